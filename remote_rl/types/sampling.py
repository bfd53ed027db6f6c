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
    flag,
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


def _min_tokens(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    integer(minimum=0)(instance, attribute, value)
    if value > instance.max_tokens:
        raise InvalidRequestError(
            f"SamplingParams.min_tokens must be at most max_tokens={instance.max_tokens}, not "
            f"{value}",
            field="min_tokens",
        )


@strict
@attrs.frozen(kw_only=True)
class SamplingParams:
    """How responses are drawn; what changes the result, and hints that only place the work.

    n: responses per prompt. max_tokens: tokens per response, at most. min_tokens: [0, max_tokens];
      before so many tokens are there, no end-of-sequence id and no id of stop_token_ids is drawn,
      and no stop string that they complete counts. It is a truncation while it holds. A stop string
      that a later token completes may take some of them away, and an abort ends a response at any.
    temperature: divides the logits; 0 is greedy, else from 1e-4 to 1e4.
    top_p, top_k, min_p: truncation, off by default (top_k: None).
    stop: strings that end a response; tokens from the first one that holds part of the match on
      are left out. include_stop: they stay instead, and the response ends with the token that
      completes the match; without stop it changes nothing. stop_token_ids: ids that end a response,
      kept as its last token, besides the model's own end-of-sequence ids.
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
    min_tokens: int = attrs.field(
        default=0, metadata=SEMANTIC, converter=plain, validator=_min_tokens
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
    include_stop: bool = attrs.field(
        default=False, metadata=SEMANTIC, converter=plain, validator=flag()
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
        """Whether top-p, top-k, min-p or min_tokens leave tokens out."""
        cut = self.top_p < 1 or self.top_k is not None or self.min_p > 0
        return cut or self.min_tokens > 0


def check_ends(
    params: SamplingParams, model: str, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> None:
    """Refuses stop ids that the model lacks, and min_tokens where every id of it is an end."""
    ids = params.stop_token_ids
    if ids and max(ids) >= vocab_size:
        raise InvalidRequestError(
            f"stop_token_ids holds {max(ids)}, but model {model!r} has {vocab_size} ids; was it "
            "taken from another tokenizer?",
            field="stop_token_ids",
        )
    if params.min_tokens and len({*eos_token_ids, *ids}) >= vocab_size:
        raise InvalidRequestError(
            f"min_tokens={params.min_tokens} leaves nothing to draw: each of the {vocab_size} ids "
            f"of model {model!r} ends a response; name fewer in stop_token_ids",
            field="min_tokens",
        )
