"""Losses: the counted tokens of a batch, and the ratio of policies on them (imports numpy, attrs,
array-api-compat, remote_rl.errors).

Every array below is flat [total] over response tokens, of one namespace and dtype. Whatever stands
at a token that does not count is replaced by 0 before any formula, so that nothing in it, NaN
included, reaches a value, a derivative or a metric.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
from array_api_compat import array_namespace, device

from ..errors import InvalidRequestError
from .aggregation import COUNTED, Aggregation
from .base import Array, Bounds
from .batch import LossBatch, segment_sum
from .metrics import How


@attrs.frozen
class Pending:
    """A metric whose numbers are still on the device: `how`, total and weight, each [] float64."""

    how: How
    total: Array
    weight: Array


@attrs.frozen
class PolicyTerm:
    """losses: per token. slopes: their derivatives by the token's own logprob. metrics: by name."""

    losses: Array
    slopes: Array
    metrics: dict[str, Pending]


@attrs.frozen(eq=False)
class Tokens:
    """One batch as the formulas see it; build with `Tokens.of`."""

    xp: Any
    batch: LossBatch
    dtype: Any
    mask: Array
    counted: Array
    outputs: dict[str, Array]

    @classmethod
    def of(cls, batch: LossBatch, outputs: Mapping[str, Array], names: Iterable[str]) -> Tokens:
        """The outputs `names`, cut from any autograd graph and checked against `batch`."""
        flat = {name: _detached(_output(outputs, name, batch)) for name in sorted(names)}
        xp = array_namespace(*flat.values(), batch.mask)
        dtype = next(iter(flat.values())).dtype
        if dtype not in (xp.float32, xp.float64):
            raise InvalidRequestError(
                f"a loss takes outputs in float32 or float64, not {dtype}; convert them first"
            )
        mask = xp.astype(batch.mask, dtype, copy=False)
        counted = mask > 0
        zero = xp.zeros_like(mask)
        masked = {name: xp.where(counted, array, zero) for name, array in flat.items()}
        return cls(xp, batch, dtype, mask, counted, masked)

    def field(self, name: str) -> Array:
        """A per-token field of the batch in the outputs' dtype, 0 where the token doesn't count."""
        array = getattr(self.batch, name)
        if array is None:
            raise InvalidRequestError(f"this loss needs {name}, which the batch lacks", field=name)
        array = self.xp.astype(array, self.dtype, copy=False)
        return self.xp.where(self.counted, array, self.xp.zeros_like(array))

    def weights(self, aggregation: Aggregation) -> Array:
        """What each token's term is multiplied by (the table of `aggregation`), 0 where it does
        not count; an open denominator is that of this batch."""
        counts = {"tokens": self.batch.tokens, "sequences": self.batch.sequences}
        counted = COUNTED[aggregation.kind]
        divisor: float = 1
        if counted is not None:
            divisor = aggregation.denominator or max(counts[counted], 1)
        if aggregation.width is not None:
            divisor *= aggregation.width
        if aggregation.kind == "sequence_mean_token_mean":
            return self.mask / (self.spread(self.row_tokens()) * divisor)
        return self.mask / divisor

    def row_tokens(self) -> Array:
        """[n], counted tokens of each row, at least 1."""
        counts = self.xp.astype(self.batch.row_tokens, self.dtype, copy=False)
        return self.xp.where(counts > 0, counts, self.xp.ones_like(counts))

    def row_means(self, values: Array) -> Array:
        """[n], the mean over each row's counted tokens; 0 where there is none."""
        sums = segment_sum(values * self.mask, self.batch.boundaries)
        return self.xp.astype(sums, self.dtype, copy=False) / self.row_tokens()

    def spread(self, per_row: Array) -> Array:
        """A value for each row as one for each of its tokens."""
        return self.xp.take(per_row, self.batch.rows, axis=0)

    def clip(self, values: Array, low: float | None, high: float | None) -> Array:
        """`values` within [low, high]; None leaves a side open."""
        # floats, since older versions of array-api-compat fail on a Python integer here
        lower, upper = (None if bound is None else float(bound) for bound in (low, high))
        return self.xp.clip(values, lower, upper)

    def total(self, values: Array) -> Array:
        """[], the sum in float64."""
        return self.xp.sum(values, dtype=self.xp.float64)

    def mean_metric(self, values: Array) -> Pending:
        """The mean over counted tokens."""
        values = self.xp.astype(values, self.dtype, copy=False)
        return Pending("mean", self.total(values * self.mask), self.total(self.mask))

    def extreme_metric(self, values: Array, how: How) -> Pending:
        """The largest or smallest value of a counted token (`how` is max or min)."""
        xp, sign = self.xp, 1.0 if how == "max" else -1.0
        candidates = xp.where(self.counted, values * sign, xp.full_like(values, -math.inf))
        floor = xp.full((1,), -math.inf, dtype=self.dtype, device=device(values))
        largest = xp.max(xp.concat([candidates, floor]))  # of an empty array there is none
        return Pending(how, xp.astype(largest, xp.float64) * sign, self.total(self.mask))


@attrs.frozen
class Ratio:
    """value: r of each token. slope: its derivative by the token's logprob."""

    value: Array
    slope: Array
    metrics: dict[str, Pending]


def policy_ratio(tokens: Tokens, kind: str, bounds: Bounds | None) -> Ratio:
    """r = exp(clamp(logprob - old_logprob)), or with kind "sequence" r = exp(clamp(mean of it over
    the row's counted tokens)) with GSPO-token's derivative (arXiv:2507.18071): r itself.

    Its metrics: ratio_mean, ratio_max, ratio_min, and two estimates of KL(old || new) from the old
    policy's samples (J. Schulman, 2020): approximate_kl_k1 = -log r, approximate_kl_k3 =
    r - 1 - log r, of the tokens' own ratios.
    """
    log_ratio = tokens.outputs["logprobs"] - tokens.field("old_logprobs")
    raw = log_ratio if kind == "token" else tokens.spread(tokens.row_means(log_ratio))
    clamped, inside = clamp(tokens, raw, bounds)
    value = tokens.xp.exp(clamped)
    per_token = clamped if kind == "token" else log_ratio
    metrics = {
        "ratio_mean": tokens.mean_metric(value),
        "ratio_max": tokens.extreme_metric(value, "max"),
        "ratio_min": tokens.extreme_metric(value, "min"),
        **_divergence_metrics(tokens, per_token),
    }
    return Ratio(value, tokens.xp.where(inside, value, tokens.xp.zeros_like(value)), metrics)


def clamp(tokens: Tokens, exponent: Array, bounds: Bounds | None) -> tuple[Array, Array]:
    """`exponent` within bounds, and where it was inside them (edges included, as torch.clamp's
    derivative has it). Never above half the dtype's largest exponent, so that neither the
    exponential nor its product with an ordinary number overflows."""
    low, high = (None, None) if bounds is None else bounds
    limit = exponent_limit(tokens)
    high = limit if high is None else min(high, limit)
    inside = exponent <= high
    if low is not None:
        inside = inside & (exponent >= low)
    return tokens.clip(exponent, low, high), inside


def exponent_limit(tokens: Tokens) -> float:
    """Half the largest exponent that the dtype holds: 44 in float32, 354 in float64."""
    return math.log(float(tokens.xp.finfo(tokens.dtype).max)) / 2


def _divergence_metrics(tokens: Tokens, log_ratio: Array) -> dict[str, Pending]:
    limit = exponent_limit(tokens)
    bounded = tokens.clip(log_ratio, -limit, limit)
    return {
        "approximate_kl_k1": tokens.mean_metric(-bounded),
        "approximate_kl_k3": tokens.mean_metric(tokens.xp.expm1(bounded) - bounded),
    }


def _output(outputs: Mapping[str, Array], name: str, batch: LossBatch) -> Array:
    if name not in outputs:
        raise InvalidRequestError(
            f"this loss is a function of the output {name!r}, which is not among "
            f"{sorted(outputs)}; compute it in the forward",
            field=name,
        )
    array, total = outputs[name], int(batch.offsets[-1])
    if tuple(array.shape) != (total,):
        raise InvalidRequestError(
            f"output {name!r} has shape {tuple(array.shape)}; the batch has {total} response "
            f"tokens, so it must be ({total},)",
            field=name,
        )
    return array


def _detached(array: Array) -> Array:
    return array.detach() if hasattr(array, "detach") else array
