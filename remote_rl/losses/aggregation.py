"""Losses: how per-token terms become one number (imports attrs, remote_rl.errors, types.fields).

Every aggregation is one weight per counted token (mask 1), so a term's value is the weighted sum of
its tokens and its derivative is the weighted derivative:

| kind                         | weight of a token                    | denominator counts |
|------------------------------|--------------------------------------|--------------------|
| sum                          | 1                                    | takes none         |
| token_mean                   | 1 / denominator                      | tokens             |
| sequence_mean_token_sum      | 1 / denominator                      | sequences          |
| sequence_mean_token_mean     | 1 / (denominator x row's own tokens) | sequences          |
| sequence_mean_token_sum_norm | 1 / (denominator x width)            | sequences          |

Tokens are counted ones only, and a sequence counts where it has at least one counted token.
"""

from __future__ import annotations

from typing import Literal

import attrs

from ..errors import InvalidRequestError
from ..types.fields import SEMANTIC, number, one_of, optional, plain, strict

Kind = Literal[
    "sum",
    "token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum_norm",
]

#: kind -> what its denominator counts
COUNTED: dict[str, Literal["tokens", "sequences"] | None] = {
    "sum": None,
    "token_mean": "tokens",
    "sequence_mean_token_sum": "sequences",
    "sequence_mean_token_mean": "sequences",
    "sequence_mean_token_sum_norm": "sequences",
}
_WITH_WIDTH = "sequence_mean_token_sum_norm"


@strict
@attrs.frozen(kw_only=True)
class Aggregation:
    """One row of the module's table; the factory functions of the same names build it.

    denominator: what the sum is divided by, in tokens or sequences as the kind counts; None means
    this batch alone. A batch that is sent in pieces gives the whole batch's number with each.
    width: only of sequence_mean_token_sum_norm, the constant that every sequence's sum is divided
    by (Dr. GRPO, arXiv:2503.20783), such as the longest response allowed.
    """

    kind: Kind = attrs.field(metadata=SEMANTIC, validator=one_of(tuple(COUNTED)))
    denominator: float | None = attrs.field(
        default=None, metadata=SEMANTIC, converter=plain, validator=optional(number(above=0))
    )
    width: float | None = attrs.field(
        default=None, metadata=SEMANTIC, converter=plain, validator=optional(number(above=0))
    )

    def __attrs_post_init__(self) -> None:
        if self.kind == "sum" and self.denominator is not None:
            raise InvalidRequestError(
                "Aggregation 'sum' takes no denominator; use 'token_mean' or leave it out",
                field="denominator",
            )
        if self.kind == _WITH_WIDTH and self.width is None:
            raise InvalidRequestError(
                "Aggregation 'sequence_mean_token_sum_norm' needs a width; write "
                "losses.sequence_mean_token_sum_norm(width=...)",
                field="width",
            )
        if self.kind != _WITH_WIDTH and self.width is not None:
            raise InvalidRequestError(
                f"Aggregation {self.kind!r} takes no width; only {_WITH_WIDTH!r} does",
                field="width",
            )

    def resolved(self, tokens: int, sequences: int) -> Aggregation:
        """The same with its denominator filled in from a batch's counts, unless it has one; a
        batch in which nothing counts gives 1, as its sum is 0."""
        counted = COUNTED[self.kind]
        if counted is None or self.denominator is not None:
            return self
        return attrs.evolve(self, denominator=max(tokens if counted == "tokens" else sequences, 1))


def as_aggregation(value: Aggregation | Kind) -> Aggregation:
    """Converter: an aggregation's kind as a string to the Aggregation; anything else is left to
    the field's validator."""
    return Aggregation(kind=value) if isinstance(value, str) else value


def token_sum() -> Aggregation:
    """The plain sum over counted tokens (exported as `losses.sum`)."""
    return Aggregation(kind="sum")


def token_mean(denominator: float | None = None) -> Aggregation:
    """The mean over counted tokens (DAPO, arXiv:2503.14476)."""
    return Aggregation(kind="token_mean", denominator=denominator)


def sequence_mean_token_sum(denominator: float | None = None) -> Aggregation:
    """The mean over sequences of the sum over their counted tokens."""
    return Aggregation(kind="sequence_mean_token_sum", denominator=denominator)


def sequence_mean_token_mean(denominator: float | None = None) -> Aggregation:
    """The mean over sequences of the mean over their counted tokens (GRPO, arXiv:2402.03300)."""
    return Aggregation(kind="sequence_mean_token_mean", denominator=denominator)


def sequence_mean_token_sum_norm(width: float, denominator: float | None = None) -> Aggregation:
    """The mean over sequences of the sum over their counted tokens divided by a constant `width`
    (Dr. GRPO, arXiv:2503.20783)."""
    return Aggregation(kind="sequence_mean_token_sum_norm", denominator=denominator, width=width)
