"""What is said of a rank or an engine that failed: one form. The workers are stood for by what
answers as they do."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from backends.arctic.config import ArcticConfig
from backends.arctic.rank_worker import Outcome
from backends.arctic.sampler_worker import SamplerWorker
from backends.arctic.trainers import TrainerGroup
from remote_rl.errors import BackendError, as_remote_error

CONFIG = ArcticConfig(model="any")
#: knows of no output
CLUSTER: Any = SimpleNamespace(last_words=lambda process: "\nIts last output:\nbye")
FORM = re.compile(
    r"(?P<worker>rank \d|sampling engine \d) (?P<what>failed|died) \(.+\) in forward; .+"
)


class Asked:
    """A worker's actor, which answers everything with this."""

    def __init__(self, answer: Any) -> None:
        self.run = SimpleNamespace(remote=self._answer)
        self._told = answer

    async def _answer(self, *given: Any) -> Any:
        if isinstance(self._told, ActorDiedError):
            raise self._told
        return self._told


def of_a_rank(answer: Any) -> BackendError:
    group = TrainerGroup(CONFIG, CLUSTER)
    error = None if isinstance(answer, ActorDiedError) else answer
    outcome = Outcome(error=error, trace=str(getattr(answer, "details", {}).get("traceback")))
    group._actors = [Asked(answer if error is None else outcome)]
    return raised(group.everywhere("forward", context=SimpleNamespace(progress=print)))  # type: ignore[arg-type]


def of_an_engine(answer: Any) -> BackendError:
    worker = SamplerWorker(0, CONFIG, CLUSTER, lambda: None)
    worker._actor, worker.ready = Asked(answer), True
    return raised(worker.ask("forward"))


def raised(work: Any) -> BackendError:
    with pytest.raises(BackendError) as caught:
        asyncio.run(work)
    return caught.value


def broken() -> Any:
    """What a worker makes of an error of its own."""
    try:
        return 1 // 0
    except ZeroDivisionError as error:
        return as_remote_error(error)


@pytest.mark.usefixtures("kills")
@pytest.mark.parametrize("asked", [of_a_rank, of_an_engine])
@pytest.mark.parametrize("answer", [broken(), ActorDiedError()], ids=["failure", "death"])
def test_one_form_names_the_worker_and_what_to_do(asked: Any, answer: Any) -> None:
    error = asked(answer)
    match = FORM.fullmatch(str(error))
    assert match, str(error)
    assert error.details["worker"] == match["worker"]
    died = isinstance(answer, ActorDiedError)
    assert match["what"] == ("died" if died else "failed")
    assert ("Its last output" if died else "ZeroDivisionError") in error.details["traceback"]


@pytest.mark.usefixtures("kills")
def test_vllm_that_fails_in_an_engine_that_lives_says_why() -> None:
    error = of_an_engine(BackendError("no room for KV", failed=True, traceback="where"))
    assert str(error) == (
        "sampling engine 0 failed (no room for KV) in forward; it is started again, and serves "
        "after the next weights.sync"
    )
    assert error.details["died"] is True


@pytest.mark.usefixtures("kills")
def test_an_engine_that_died_since_it_was_chosen_is_told_as_dead() -> None:
    """Whoever asks it then goes on with the others, as where it dies while it is asked."""
    worker = SamplerWorker(0, CONFIG, CLUSTER, lambda: None)
    worker._actor, worker.ready = Asked(None), True
    worker.give_up("hangs")
    for begun_again in (None, Asked(None)):  # it loads its model
        worker._actor = begun_again
        error = raised(worker.ask("connect"))
        assert error.details["died"] is True
        assert "sampling engine 0 hangs; it was ended" in str(error)
    worker.failure = BackendError("it could not be started again", worker=worker.name)
    error = raised(worker.ask("connect"))
    assert str(error).startswith("sampling engine 0 is gone; it is started again")
    assert error.details["died"] is True


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no Ray to end an actor."""
    monkeypatch.setattr("ray.kill", lambda actor: None)
