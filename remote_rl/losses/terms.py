"""Losses: the terms a loss may add, KL and entropy (imports attrs, remote_rl.types.fields)."""

from __future__ import annotations

from typing import Literal

import attrs

from ..types.fields import SEMANTIC, instance_of, number, one_of, optional, plain, strict
from .aggregation import Aggregation, as_aggregation
from .base import Bounds, as_bounds, check_bounds

Estimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"]
ESTIMATORS: tuple[Estimator, ...] = ("k1", "k2", "k3", "abs", "k1+", "k3+", "abs+")

TOKEN_MEAN = Aggregation(kind="token_mean")
is_aggregation = instance_of(Aggregation, wanted="an aggregation of losses or its kind")


def _default_log_ratio_clamp(term: KL) -> Bounds | None:
    return (-20.0, 20.0) if term.estimator in ("k3", "k3+") else None


def _default_value_clamp(term: KL) -> float | None:
    return 10.0 if term.estimator in ("k3", "k3+") else None


@strict
@attrs.frozen
class KL:
    """Adds coef x the estimated KL(policy || reference); needs `ref_logprobs`.

    With x = logprob - ref_logprob of a token, by estimator (J. Schulman, "Approximating KL
    divergence", 2020, joschu.net/blog/kl-approx.html):

    * k1:  x                    (verl: kl, k1)
    * abs: |x|                  (verl: abs)
    * k2:  x^2 / 2              (verl: mse, k2; also mse+ and k2+, which change nothing)
    * k3:  exp(-x) - 1 + x      (verl: low_var_kl, k3)
    * k1+, abs+, k3+: the value of the one without "+", the derivative of k2 unclamped, which is x:
      the only one whose expectation on policy is the gradient of the KL
      (verl: kl+ or k1+, abs+, low_var_kl+ or k3+)

    log_ratio_clamp: x is clamped to it, a number c for (-c, c) or a pair; by default 20 for k3,
    None (no clamp) for the others. value_clamp: the estimate is clamped to (-c, c); by default 10
    for k3. Where a clamp is active, the derivative is 0, as of torch.clamp. These are verl's and
    SkyRL's clamps. An exponent beyond what the dtype's square root holds (44 in float32, 354 in
    float64) is clamped in any case, so that nothing overflows.
    """

    coef: float = attrs.field(metadata=SEMANTIC, converter=plain, validator=number())
    estimator: Estimator = attrs.field(
        default="k3", metadata=SEMANTIC, kw_only=True, validator=one_of(ESTIMATORS)
    )
    aggregation: Aggregation = attrs.field(
        default=TOKEN_MEAN,
        metadata=SEMANTIC,
        kw_only=True,
        converter=as_aggregation,
        validator=is_aggregation,
    )
    log_ratio_clamp: Bounds | None = attrs.field(
        default=attrs.Factory(_default_log_ratio_clamp, takes_self=True),
        metadata=SEMANTIC,
        kw_only=True,
        converter=as_bounds,
        validator=check_bounds,
    )
    value_clamp: float | None = attrs.field(
        default=attrs.Factory(_default_value_clamp, takes_self=True),
        metadata=SEMANTIC,
        kw_only=True,
        converter=plain,
        validator=optional(number(above=0)),
    )


@strict
@attrs.frozen
class Entropy:
    """Subtracts coef x the policy's entropy (a bonus for coef > 0); needs the output `entropy`.

    coef 0 changes no gradient and reports the metric `entropy`.
    """

    coef: float = attrs.field(metadata=SEMANTIC, converter=plain, validator=number())
    aggregation: Aggregation = attrs.field(
        default=TOKEN_MEAN,
        metadata=SEMANTIC,
        kw_only=True,
        converter=as_aggregation,
        validator=is_aggregation,
    )
