"""Shim (loop side, above the client): verl's sampling parameters and outputs, translated.

Imports remote_rl and verl's `TokenOutput`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from verl.workers.rollout.replica import TokenOutput

from remote_rl import SamplingParams, errors
from remote_rl.types import Sample

from ..common.drawing import drawn_logprobs
from ..common.vllm_params import build_params, to_fields

#: another name of max_tokens
_OTHERS = ("max_new_tokens",)


@attrs.frozen(kw_only=True)
class Limits:
    """verl's length budget: `rollout.prompt_length`, `response_length` and `max_model_len`."""

    prompt_length: int
    response_length: int
    max_model_len: int | None = None

    def max_tokens(self, prompt_tokens: int, asked: int | None) -> int:
        """How long a response may be, by the rule of verl's own vLLM server."""
        if asked is None:
            asked = min(
                self.response_length, self.prompt_length + self.response_length - prompt_tokens
            )
        if self.max_model_len is not None:
            room = self.max_model_len - prompt_tokens
            if room < 1:
                raise errors.InvalidRequestError(
                    f"a prompt of {prompt_tokens} tokens leaves no room within "
                    f"actor_rollout_ref.rollout.max_model_len={self.max_model_len}"
                )
            asked = min(asked, room)
        return max(1, asked)


def to_params(
    given: Mapping[str, Any],
    *,
    prompt_tokens: int,
    limits: Limits,
    end_token_ids: tuple[int, ...] = (),
    session_id: str | None = None,
    priority: int = 0,
) -> SamplingParams:
    """verl's sampling dict as `SamplingParams`.

    end_token_ids: end-of-sequence ids that verl knows of and the server's model does not.
    Raises `UnsupportedError` for a key or value that has no counterpart.
    """
    fields = to_fields(given, path=_argument, end_token_ids=end_token_ids, others=_OTHERS)
    asked = given.get("max_tokens", given.get("max_new_tokens"))
    return build_params(
        {
            **fields,
            "max_tokens": limits.max_tokens(prompt_tokens, asked),
            "session_id": session_id,
            "priority": priority,
        },
        logprobs=bool(given.get("logprobs")),
    )


def to_token_output(sample: Sample, params: SamplingParams) -> TokenOutput:
    """One sample as verl's `TokenOutput`; ids and logprobs are the sampler's own."""
    logprobs = None
    if params.outputs:
        logprobs = drawn_logprobs(
            sample,
            params,
            remedy="set actor_rollout_ref.rollout.calculate_log_probs=False",
        )
    return TokenOutput(
        token_ids=sample.tokens.tolist(),
        log_probs=logprobs,
        stop_reason="aborted" if sample.finish_reason == "abort" else "completed",
        extra_fields={
            "global_steps": sample.label,
            "min_global_steps": sample.first_label,
            "max_global_steps": sample.label,
        },
    )


def _argument(name: str) -> str:
    """How an error names what an agent loop passed to `generate`."""
    return f"sampling_params.{name}"
