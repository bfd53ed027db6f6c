"""Contract: how responses are drawn (imports numpy, attrs, errors and fields)."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from ..errors import InvalidRequestError
from .fields import (
    SCHEDULING,
    SEMANTIC,
    as_names,
    as_tuple,
    each,
    integer,
    number,
    one_of,
    optional,
    plain,
    strict,
    temperature,
    text,
)

#: what a sample can come with, besides its tokens
SAMPLING_OUTPUTS = ("logprobs", "drawn_logprobs")


def _top_k(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if isinstance(value, (int, np.integer)) and value in (0, -1):  # what engines call "off"
        raise InvalidRequestError(
            f"SamplingParams.top_k must be a whole number >= 1, not {value!r}; "
            "None leaves no token out",
            field="top_k",
        )
    optional(integer(minimum=1))(instance, attribute, value)


@strict
@attrs.frozen(kw_only=True)
class SamplingParams:
    """How responses are drawn; what changes the result, and hints that only place the work.

    n: responses per prompt. max_tokens: tokens per response, at most.
    temperature: divides the logits; 0 is greedy, else from 1e-4 to 1e4.
    top_p, top_k, min_p: truncation, off by default (top_k: None).
    stop: strings that end a response; tokens from the first one that holds part of the match on
      are left out. stop_token_ids: ids that end a response, kept as its last token, besides the
      model's own end-of-sequence ids.
    seed: [0, 2**63); equal seeds give equal responses at equal weights, whatever else is in
      flight; None derives one from the run's seed and a counter that checkpoints hold.
    outputs: which of {"logprobs", "drawn_logprobs"} come with each sample.
    session_id, priority, cache_salt: routing only; never change the distribution.
    """

    n: int = attrs.field(
        default=1, metadata=SEMANTIC, converter=plain, validator=integer(minimum=1)
    )
    max_tokens: int = attrs.field(
        metadata=SEMANTIC, converter=plain, validator=integer(minimum=1, maximum=2**31 - 1)
    )
    temperature: float = attrs.field(
        default=1.0, metadata=SEMANTIC, converter=plain, validator=temperature()
    )
    top_p: float = attrs.field(
        default=1.0, metadata=SEMANTIC, converter=plain, validator=number(above=0, maximum=1)
    )
    top_k: int | None = attrs.field(
        default=None, metadata=SEMANTIC, converter=plain, validator=_top_k
    )
    min_p: float = attrs.field(
        default=0.0, metadata=SEMANTIC, converter=plain, validator=number(minimum=0, maximum=1)
    )
    stop: tuple[str, ...] = attrs.field(
        default=(), metadata=SEMANTIC, converter=as_tuple, validator=each(text())
    )
    stop_token_ids: tuple[int, ...] = attrs.field(
        default=(), metadata=SEMANTIC, converter=as_tuple, validator=each(integer(minimum=0))
    )
    seed: int | None = attrs.field(
        default=None,
        metadata=SEMANTIC,
        converter=plain,
        validator=optional(integer(minimum=0, maximum=2**63 - 1)),
    )
    outputs: frozenset[str] = attrs.field(
        default=frozenset({"logprobs"}),
        metadata=SEMANTIC,
        converter=as_names,
        validator=each(one_of(SAMPLING_OUTPUTS)),
    )
    session_id: str | None = attrs.field(
        default=None, metadata=SCHEDULING, validator=optional(text())
    )
    priority: int = attrs.field(
        default=0, metadata=SCHEDULING, converter=plain, validator=integer()
    )
    cache_salt: str | None = attrs.field(
        default=None, metadata=SCHEDULING, validator=optional(text())
    )

    @property
    def truncates(self) -> bool:
        """Whether top-p, top-k or min-p leave tokens out."""
        return self.top_p < 1 or self.top_k is not None or self.min_p > 0
