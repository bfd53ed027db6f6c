"""Shim (loop side, above the client): sampling parameters in vLLM's shape, as the frameworks write
them.

Imports attrs and remote_rl. The lengths and the routing hints of a request are each framework's own
matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import attrs

from remote_rl import SamplingParams, errors

from .drawing import logprobs_output
from .rules import refuse

#: keys that carry over under their own names
_SAME: Final = ("temperature", "top_p", "min_p", "min_tokens", "seed", "stop", "stop_token_ids")
#: keys whose only supported value is the neutral one
_NEUTRAL: Final = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "ignore_eos": False,
    "n": 1,
}
_OTHER: Final = ("top_k", "include_stop_str_in_output", "max_tokens", "logprobs")


def to_fields(
    given: Mapping[str, Any],
    *,
    path: Callable[[str], str],
    others: Iterable[str] = (),
    end_token_ids: Iterable[int] = (),
) -> dict[str, Any]:
    """Fields of `SamplingParams`, all but max_tokens, outputs and the routing hints.

    given: by vLLM's names; None is a key that was not given. path: the framework's own key of one
    of them. others: keys that the framework's shim reads itself. end_token_ids: end-of-sequence ids
    that the framework knows of and the server's model does not.
    Raises `UnsupportedError` for a key or value that has no counterpart.
    """
    _refuse_unknown(given, path, (*_SAME, *_NEUTRAL, *_OTHER, *others))
    fields = {name: given[name] for name in _SAME if given.get(name) is not None}
    stop_token_ids = (*fields.pop("stop_token_ids", ()), *end_token_ids)
    if stop_token_ids:
        fields["stop_token_ids"] = tuple(dict.fromkeys(stop_token_ids))
    top_k = given.get("top_k")
    if top_k is not None and top_k > 0:  # "off" is written as -1 or 0
        fields["top_k"] = top_k
    if given.get("include_stop_str_in_output") and fields.get("stop"):
        fields["include_stop"] = given["include_stop_str_in_output"]
    return fields


def build_params(fields: Mapping[str, Any], *, logprobs: bool) -> SamplingParams:
    """`SamplingParams` of `fields`; logprobs: with those of the distribution that is drawn from."""
    params = SamplingParams(**fields, outputs=())
    return attrs.evolve(params, outputs={logprobs_output(params)}) if logprobs else params


def _refuse_unknown(
    given: Mapping[str, Any], path: Callable[[str], str], known: tuple[str, ...]
) -> None:
    for name, value in given.items():
        if name not in known:
            refuse(
                path(name),
                value,
                f"there is no sampling parameter {name!r}; {errors.nearest(name, known)}",
            )
        if name in _NEUTRAL and value is not None and value != _NEUTRAL[name]:
            refuse(
                path(name),
                value,
                f"the server draws from the policy as it is; only {_NEUTRAL[name]!r} can be "
                "honoured",
            )
