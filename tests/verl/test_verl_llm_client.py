"""What agent loops generate with: retries, then an error that the trainer hears of."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from verl_rows import sample

from remote_rl import Group, SamplingParams, errors
from shims.verl import failures, sessions
from shims.verl.llm_client import RemoteLLMClient

PARAMS = {"temperature": 0.9, "top_p": 1.0, "top_k": -1, "logprobs": True}


class StubSession:
    """Answers generate with the given outcomes, one a call."""

    def __init__(self, outcomes: Iterator[Any]) -> None:
        self.sampling = self
        self.asked: list[tuple[Any, SamplingParams]] = []
        self._outcomes = outcomes

    async def generate(self, prompts: Any, params: SamplingParams) -> tuple[Group, ...]:
        self.asked.append((prompts, params))
        outcome = next(self._outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return (Group(prompt=prompts[0], samples=[outcome], temperature=0.9, prompt_index=0),)


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Failures that were told to the trainer."""
    told: list[str] = []

    async def report(error: Exception) -> None:
        told.append(str(error))

    monkeypatch.setattr(failures, "report", report)
    return told


@pytest.fixture
def generate(config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """One generation against the given outcomes: (result, session)."""

    def run(*outcomes: Any, **arguments: Any) -> tuple[Any, StubSession]:
        session = StubSession(iter(outcomes))
        monkeypatch.setattr(sessions, "member", lambda handle: session)
        client = RemoteLLMClient(
            config(), None, end_token_ids=(1,), hints=frozenset({"session_id"})
        )
        client = pickle.loads(pickle.dumps(client))  # as it reaches the agent-loop worker
        arguments = {"prompt_ids": [2, 3], "sampling_params": dict(PARAMS), **arguments}
        return asyncio.run(client.generate("request", **arguments)), session

    return run


def test_token_ids_in_token_ids_out(generate: Callable[..., Any], reports: list[str]) -> None:
    output, session = generate(sample())
    assert output.token_ids == [7, 1]
    assert output.log_probs == [-0.5, -0.25]
    [(prompts, params)] = session.asked
    assert prompts == [[2, 3]]
    assert params.stop_token_ids == (1,)
    assert params.session_id == "request"
    assert reports == []


@pytest.mark.parametrize("error", [errors.BackendError("worker"), errors.StalledError("silence")])
def test_an_engines_failure_is_retried(
    generate: Callable[..., Any], reports: list[str], error: Exception
) -> None:
    output, session = generate(error, error, sample())
    assert output.token_ids == [7, 1]
    assert len(session.asked) == 3
    assert reports == []


def test_a_failure_that_stays_is_told_to_the_trainer_and_raised(
    generate: Callable[..., Any], reports: list[str]
) -> None:
    with pytest.raises(errors.BackendError, match="worker 2") as raised:
        generate(*(errors.BackendError(f"worker {number}") for number in range(3)))
    assert raised.value.__notes__ == ["after 3 attempts"]
    assert reports == ["worker 2"]


def test_a_lost_run_is_not_tried_again(generate: Callable[..., Any], reports: list[str]) -> None:
    with pytest.raises(errors.RunLostError):
        generate(errors.RunLostError("gone"), sample())
    assert reports == ["gone"]


def test_images_are_refused(generate: Callable[..., Any], reports: list[str]) -> None:
    with pytest.raises(errors.UnsupportedError, match="image_data"):
        generate(sample(), image_data=["picture"])


def test_without_a_handle_it_says_how_to_get_one() -> None:
    with pytest.raises(errors.InvalidRequestError, match="trainer_mode=remote_rl"):
        sessions.member(None)
