"""Losses: per-token KL estimates and their derivatives (imports tokens)."""

from __future__ import annotations

from collections.abc import Callable

from .base import Array
from .terms import KL
from .tokens import Tokens, clamp


def estimate(term: KL, tokens: Tokens) -> tuple[Array, Array]:
    """Per token, the estimate named by `term.estimator` and its derivative by the logprob; see
    `KL` for formulas and clamps."""
    xp = tokens.xp
    difference = tokens.outputs["logprobs"] - tokens.field("ref_logprobs")
    values, slopes = _FORMULAS[term.estimator.removesuffix("+")](term, tokens, difference)
    if term.value_clamp is not None:
        inside = (values >= -term.value_clamp) & (values <= term.value_clamp)
        values = tokens.clip(values, -term.value_clamp, term.value_clamp)
        slopes = xp.where(inside, slopes, xp.zeros_like(slopes))
    if term.estimator.endswith("+"):
        slopes = difference
    return values, slopes


def _bounded(term: KL, tokens: Tokens, difference: Array) -> tuple[Array, Array]:
    # the clamped difference and its derivative, 1 inside and 0 outside
    if term.log_ratio_clamp is None:
        return difference, tokens.xp.ones_like(difference)
    low, high = term.log_ratio_clamp
    inside = tokens.xp.ones_like(tokens.counted)
    if low is not None:
        inside = inside & (difference >= low)
    if high is not None:
        inside = inside & (difference <= high)
    return tokens.clip(difference, low, high), tokens.xp.astype(inside, tokens.dtype)


def _k1(term: KL, tokens: Tokens, difference: Array) -> tuple[Array, Array]:
    return _bounded(term, tokens, difference)


def _absolute(term: KL, tokens: Tokens, difference: Array) -> tuple[Array, Array]:
    bounded, slope = _bounded(term, tokens, difference)
    return tokens.xp.abs(bounded), tokens.xp.sign(bounded) * slope


def _k2(term: KL, tokens: Tokens, difference: Array) -> tuple[Array, Array]:
    bounded, slope = _bounded(term, tokens, difference)
    return bounded * bounded / 2, bounded * slope


def _k3(term: KL, tokens: Tokens, difference: Array) -> tuple[Array, Array]:
    # in y = -difference: exp(y) - 1 - y, and its derivative by the logprob, 1 - exp(y)
    low, high = term.log_ratio_clamp or (None, None)
    flipped = (None if high is None else -high, None if low is None else -low)
    exponent, inside = clamp(tokens, -difference, flipped)
    growth = tokens.xp.expm1(exponent)
    return growth - exponent, tokens.xp.where(inside, -growth, tokens.xp.zeros_like(growth))


_FORMULAS: dict[str, Callable[[KL, Tokens, Array], tuple[Array, Array]]] = {
    "k1": _k1,
    "abs": _absolute,
    "k2": _k2,
    "k3": _k3,
}
