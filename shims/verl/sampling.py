"""Shim (loop side, above the client): verl's sampling parameters and outputs, translated.

Imports remote_rl and verl's `TokenOutput`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
from verl.workers.rollout.replica import TokenOutput

from remote_rl import SamplingParams, errors
from remote_rl.types import Sample

#: keys of verl's dict that carry over under their own names
_SAME = ("temperature", "top_p", "min_p", "seed", "stop", "stop_token_ids")
#: keys whose only supported value is the neutral one
_NEUTRAL = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "ignore_eos": False,
    "n": 1,
}
_OTHER = ("top_k", "logprobs", "max_tokens", "max_new_tokens")


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
    _refuse_unknown(given)
    fields = {name: given[name] for name in _SAME if given.get(name) is not None}
    stop_token_ids = (*fields.pop("stop_token_ids", ()), *end_token_ids)
    if stop_token_ids:
        fields["stop_token_ids"] = tuple(dict.fromkeys(stop_token_ids))
    top_k = given.get("top_k")
    if top_k is not None and top_k > 0:  # verl writes "off" as -1 or 0
        fields["top_k"] = top_k
    asked = given.get("max_tokens", given.get("max_new_tokens"))
    params = SamplingParams(
        **fields,
        max_tokens=limits.max_tokens(prompt_tokens, asked),
        session_id=session_id,
        priority=priority,
        outputs=(),
    )
    if not given.get("logprobs"):
        return params
    return attrs.evolve(params, outputs={_logprobs_output(params)})


def to_token_output(sample: Sample, params: SamplingParams) -> TokenOutput:
    """One sample as verl's `TokenOutput`; ids and logprobs are the sampler's own."""
    logprobs = None
    if params.outputs:
        logprobs = getattr(sample, _logprobs_output(params))
        if logprobs is None:
            raise errors.BackendError(
                f"the server returned no {_logprobs_output(params)} for a sample, though it "
                "declares them; set actor_rollout_ref.rollout.calculate_log_probs=False"
            )
        logprobs = logprobs.tolist()
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


def continued(sample: Sample, rest: Sample) -> Sample:
    """A response that ended early and what was drawn after it, as one; its first and last version
    and label are those of the first and the last token."""
    if not len(rest):
        return attrs.evolve(sample, finish_reason=rest.finish_reason)
    first = sample if len(sample) else rest
    return attrs.evolve(
        rest,
        tokens=np.concatenate([sample.tokens, rest.tokens]),
        logprobs=_joined(sample.logprobs, rest.logprobs),
        drawn_logprobs=_joined(sample.drawn_logprobs, rest.drawn_logprobs),
        first_version=first.first_version,
        first_label=first.first_label,
    )


def _joined(before: Any, after: Any) -> Any:
    return None if before is None or after is None else np.concatenate([before, after])


def _logprobs_output(params: SamplingParams) -> str:
    # verl's rollout_log_probs are of the distribution drawn from (logprobs_mode=processed_logprobs)
    return "drawn_logprobs" if params.truncates else "logprobs"


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    known = (*_SAME, *_NEUTRAL, *_OTHER)
    for name, value in given.items():
        if name not in known:
            raise errors.UnsupportedError(
                f"the agent loop asked for the sampling parameter {name!r}, which remote_rl has "
                f"no counterpart for; {errors.nearest(name, known)}"
            )
        if name in _NEUTRAL and value is not None and value != _NEUTRAL[name]:
            raise errors.UnsupportedError(
                f"the agent loop asked for {name}={value!r}; remote_rl can only honour "
                f"{name}={_NEUTRAL[name]!r}"
            )
