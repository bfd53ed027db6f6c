"""SkyRL's sampling parameters to SamplingParams, samples to its outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_vllm_sampling_params
from skyrl.train.config import SamplingParams as Section

from remote_rl import Sample, SamplingParams, errors
from remote_rl.byte_tokenizer import ByteTokenizer
from shims.skyrl.sampling import to_output, to_params

TOKENIZER = ByteTokenizer()


def given(**section: Any) -> dict[str, Any]:
    """What SkyRL makes of its section of the configuration."""
    made: dict[str, Any] = get_vllm_sampling_params(Section(**section))
    return made


def sample(**fields: Any) -> Sample:
    return Sample(
        **{
            "tokens": [72, 105, TOKENIZER.eos_token_id],
            "logprobs": [-0.5, -1.5, -0.25],
            "drawn_logprobs": [-0.375, -1.25, -0.125],
            "finish_reason": "stop",
            "first_version": 3,
            "last_version": 4,
            "prompt_index": 0,
            "index": 0,
            **fields,
        }
    )


def test_skyrls_defaults() -> None:
    assert to_params(given()) == SamplingParams(
        max_tokens=1024, min_tokens=1, outputs={"drawn_logprobs"}
    )


def test_every_field_of_the_section() -> None:
    section = given(
        max_generate_length=6,
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        min_p=0.05,
        logprobs=0,
        stop=["!", "?"],
        additional_kwargs={"stop_token_ids": [9, 1], "seed": 4, "repetition_penalty": 1.0},
    )
    assert to_params(section, end_token_ids=(1, 2)) == SamplingParams(
        max_tokens=6,
        min_tokens=1,
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        min_p=0.05,
        stop=("!", "?"),
        include_stop=True,
        stop_token_ids=(9, 1, 2),
        seed=4,
        outputs={"drawn_logprobs"},
    )


def test_what_is_off_stays_off() -> None:
    params = to_params(given(top_k=-1, stop=[], logprobs=None))
    assert (params.top_k, params.stop, params.include_stop) == (None, (), False)
    assert params.outputs == frozenset()


def test_without_min_tokens_the_distribution_is_the_whole_one() -> None:
    params = to_params({**given(max_generate_length=3), "min_tokens": 0})
    assert params == SamplingParams(max_tokens=3, outputs={"logprobs"})


def test_hints_pass_through() -> None:
    params = to_params(given(), session_id="trajectory", cache_salt="7")
    assert (params.session_id, params.cache_salt) == ("trajectory", "7")


@pytest.mark.parametrize(
    ("section", "key", "told"),
    [
        ({"additional_kwargs": {"top_kk": 4}}, "additional_kwargs.top_kk", "'top_k'"),
        ({"additional_kwargs": {"repetition_penalty": 1.1}}, "additional_kwargs.rep", "only 1.0"),
        ({"additional_kwargs": {"n": 2}}, "additional_kwargs.n", "only 1 can"),
        ({"additional_kwargs": {"ignore_eos": True}}, "additional_kwargs.ignore_eos", "only False"),
        ({"logprobs": 2}, "logprobs=2", "set it to 1"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_key(
    section: dict[str, Any], key: str, told: str
) -> None:
    with pytest.raises(errors.UnsupportedError) as raised:
        to_params(given(**section), path="generator.eval_sampling_params")
    assert str(raised.value).startswith(f"generator.eval_sampling_params.{key}")
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"max_generate_length": 0}, "max_generate_length"),
        ({"additional_kwargs": {"seed": -1}}, "additional_kwargs.seed"),
    ],
)
def test_a_value_out_of_range_is_refused_by_key(section: dict[str, Any], key: str) -> None:
    with pytest.raises(errors.InvalidRequestError) as raised:
        to_params(given(**section))
    assert str(raised.value).startswith(f"generator.sampling_params.{key} must be")
    assert raised.value.details["field"] == f"generator.sampling_params.{key}"


def test_a_response_without_an_end_is_refused() -> None:
    with pytest.raises(errors.InvalidRequestError, match="max_generate_length is missing"):
        to_params({})


def test_output() -> None:
    cut = sample(tokens=[33], logprobs=[-1.0], drawn_logprobs=[-0.75], finish_reason="length")
    asked = given()
    output = to_output([sample(), cut], to_params(asked), TOKENIZER, asked)
    assert output["responses"] == ["Hi", "!"]
    assert output["response_ids"] == [[72, 105, TOKENIZER.eos_token_id], [33]]
    assert output["stop_reasons"] == ["stop", "length"]
    assert output["response_logprobs"] == [
        np.float32([-0.375, -1.25, -0.125]).tolist(),
        np.float32([-0.75]).tolist(),
    ]
    assert output["policy_versions"] == [(3, 4), (3, 4)]


def test_special_tokens_stay_in_the_text_where_asked_for() -> None:
    asked = {**given(logprobs=None), "skip_special_tokens": False}
    output = to_output([sample()], to_params(asked), TOKENIZER, asked)
    assert output["responses"] == ["Hi<eos>"]
    assert output["response_logprobs"] is None


def test_missing_logprobs_are_an_error_not_none() -> None:
    asked = given()
    with pytest.raises(errors.BackendError, match=r"no drawn_logprobs.*logprobs=null"):
        to_output([sample(drawn_logprobs=None)], to_params(asked), TOKENIZER, asked)
