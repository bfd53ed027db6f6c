"""verl's sampling parameters to SamplingParams, samples to TokenOutput."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from remote_rl import Group, Sample, SamplingParams, errors
from shims.common.drawing import draw
from shims.verl.sampling import Limits, to_params, to_token_output

#: what verl's agent-loop worker passes for training
GIVEN = {
    "temperature": 0.9,
    "top_p": 1.0,
    "top_k": -1,
    "repetition_penalty": 1.0,
    "logprobs": True,
}


def params(given: dict[str, Any], prompt_tokens: int = 4, **options: Any) -> SamplingParams:
    limits = options.pop("limits", Limits(prompt_length=8, response_length=6))
    return to_params(given, prompt_tokens=prompt_tokens, limits=limits, **options)


def sample(**fields: Any) -> Sample:
    given: dict[str, Any] = {
        "tokens": [5, 6],
        "logprobs": [-0.5, -1.5],
        "finish_reason": "stop",
        "first_version": 3,
        "last_version": 3,
        "first_label": 6,
        "label": 7,
        "prompt_index": 0,
        "index": 0,
        **fields,
    }
    return Sample(**given)


def test_a_training_request() -> None:
    assert params(GIVEN) == SamplingParams(temperature=0.9, max_tokens=6, outputs={"logprobs"})


def test_truncated_sampling_returns_the_logprobs_of_what_it_drew_from() -> None:
    asked = params({**GIVEN, "top_p": 0.9, "top_k": 5})
    assert asked == SamplingParams(
        temperature=0.9, top_p=0.9, top_k=5, max_tokens=6, outputs={"drawn_logprobs"}
    )
    output = to_token_output(sample(drawn_logprobs=[-0.25, -1.0]), asked)
    assert output.log_probs == [-0.25, -1.0]


def test_no_logprobs_where_verl_asks_for_none() -> None:
    asked = params({**GIVEN, "logprobs": False})
    assert asked.outputs == frozenset()
    assert to_token_output(sample(), asked).log_probs is None


def test_missing_logprobs_are_an_error_not_none() -> None:
    with pytest.raises(errors.BackendError, match="no logprobs"):
        to_token_output(sample(logprobs=None), params(GIVEN))


@pytest.mark.parametrize(
    ("prompt_tokens", "given", "max_model_len", "wanted"),
    [
        (4, {}, None, 6),  # response_length
        (11, {}, None, 3),  # what is left of prompt_length + response_length in a later turn
        (20, {}, None, 1),  # never less than one
        (4, {"max_tokens": 2}, None, 2),
        (4, {"max_new_tokens": 3}, None, 3),
        (4, {"max_tokens": 50}, 12, 8),  # clamped by the model's length
    ],
)
def test_max_tokens_follow_verls_own_server(
    prompt_tokens: int, given: dict[str, Any], max_model_len: int | None, wanted: int
) -> None:
    limits = Limits(prompt_length=8, response_length=6, max_model_len=max_model_len)
    asked = params({**GIVEN, **given}, prompt_tokens, limits=limits)
    assert asked.max_tokens == wanted


def test_a_prompt_without_room_is_refused() -> None:
    limits = Limits(prompt_length=8, response_length=6, max_model_len=10)
    with pytest.raises(errors.InvalidRequestError, match="max_model_len=10"):
        params(GIVEN, 10, limits=limits)


def test_end_ids_join_the_agent_loops_own_stop_ids() -> None:
    asked = params({**GIVEN, "stop_token_ids": [9, 1], "stop": "!"}, end_token_ids=(1, 2))
    assert asked.stop_token_ids == (9, 1, 2)
    assert asked.stop == ("!",)


def test_min_tokens_and_include_stop_str_in_output_are_mapped() -> None:
    # what every request of vLLM's shape may say
    plain = {"min_tokens": 1, "include_stop_str_in_output": True}
    asked = params({**GIVEN, **plain})
    assert asked == SamplingParams(
        temperature=0.9, max_tokens=6, min_tokens=1, outputs={"drawn_logprobs"}
    ), "without stop strings there is nothing to include, and the server need not offer it"
    asked = params({**GIVEN, **plain, "stop": ["!"]})
    assert (asked.min_tokens, asked.stop, asked.include_stop) == (1, ("!",), True)
    neutral = {"min_tokens": 0, "include_stop_str_in_output": False, "stop": ["!"]}
    assert params({**GIVEN, **neutral}) == params({**GIVEN, "stop": ["!"]})


def test_min_tokens_beyond_the_length_left_are_refused() -> None:
    with pytest.raises(errors.InvalidRequestError, match=r"at most max_tokens=6, not 7"):
        params({**GIVEN, "min_tokens": 7})


def test_a_continued_response_needs_what_is_left_of_min_tokens() -> None:
    parts = iter([sample(finish_reason="abort"), sample(finish_reason="abort"), sample()])
    asked = []

    class Session:
        def __init__(self) -> None:
            self.sampling = self

        async def generate(self, prompts: Any, params: SamplingParams) -> Any:
            asked.append((len(prompts[0]), params.min_tokens, params.max_tokens))
            return (
                Group(prompt=prompts[0], samples=[next(parts)], temperature=1.0, prompt_index=0),
            )

    given = SamplingParams(max_tokens=8, min_tokens=3)
    session: Any = Session()
    whole = asyncio.run(draw(session, [1], given, attempts=1, resumes=True))
    assert asked == [(1, 3, 8), (3, 1, 6), (5, 0, 4)]
    assert whole.tokens.tolist() == [5, 6] * 3


def test_routing_hints_pass_through() -> None:
    asked = params(GIVEN, session_id="turns", priority=2)
    assert (asked.session_id, asked.priority) == ("turns", 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"ignore_eos": True}, "ignore_eos=True"),
        ({"top_kk": 4}, "'top_kk'.*'top_k'"),
    ],
)
def test_what_has_no_counterpart_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.UnsupportedError, match=message):
        params({**GIVEN, **given})


@pytest.mark.parametrize(
    ("reason", "wanted"), [("stop", "completed"), ("length", "completed"), ("abort", "aborted")]
)
def test_token_output(reason: Any, wanted: str) -> None:
    output = to_token_output(sample(finish_reason=reason), params(GIVEN))
    assert output.token_ids == [5, 6]
    assert output.log_probs == np.float32([-0.5, -1.5]).tolist()
    assert output.stop_reason == wanted
    steps = {"global_steps": 7, "min_global_steps": 6, "max_global_steps": 7}
    assert output.extra_fields == steps
