"""Losses: from a loss, a batch and the model's outputs to value, derivatives and metrics (imports
attrs, array-api-compat, remote_rl.errors, types).

The one implementation for every backend: numpy and torch arrays take the same path and give the
same numbers. A backend calls `resolve` on the whole batch, cuts it into any pieces, calls
`evaluate` on each, adds up the values, backpropagates the sum over outputs of derivative x output,
and merges the metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import numpy as np

from ..errors import InvalidRequestError
from . import policy_terms
from .base import Array, Loss
from .batch import LossBatch, tokens_per_row
from .cotangents import Cotangents, apply
from .divergence import estimate
from .metrics import Metric
from .spec import CISPO, PPO, CrossEntropy, FormulaLoss, ImportanceSampling, Reinforce
from .tokens import Pending, PolicyTerm, Tokens

if TYPE_CHECKING:
    from ..types import Batch

LossType = TypeVar("LossType", bound=Loss)

_POLICY_TERMS: dict[type[FormulaLoss], Callable[[Any, Tokens], PolicyTerm]] = {
    PPO: policy_terms.ppo,
    CISPO: policy_terms.cispo,
    ImportanceSampling: policy_terms.importance_sampling,
    Reinforce: policy_terms.reinforce,
    CrossEntropy: policy_terms.cross_entropy,
}


@attrs.frozen(eq=False)
class LossValue:
    """value: the loss. derivatives: output name to [total], its derivative by each token's output,
    in the output's namespace, dtype and device. metrics: by name, mergeable over pieces."""

    value: float
    derivatives: dict[str, Array]
    metrics: dict[str, Metric]


def resolve(loss: LossType, batch: Batch) -> LossType:
    """`loss` with the open denominators of all its aggregations filled in from the whole `batch`,
    so that evaluating it on pieces of the batch and adding up gives the whole."""
    counts = tokens_per_row(batch.mask)
    return loss.resolved(int(counts.sum()), int(np.count_nonzero(counts)))


def evaluate(loss: Loss, batch: LossBatch, outputs: Mapping[str, Array]) -> LossValue:
    """Value, derivatives and metrics of `loss`; pure, and without autograd.

    outputs: name to [total], float32 or float64; more than the loss needs is ignored.
    Metrics: `policy_loss`, `kl_loss`, `entropy` (each aggregated, before coefficient and scale),
    `ratio_mean`, `ratio_max`, `ratio_min`, `approximate_kl_k1`, `approximate_kl_k3`,
    `clip_fraction` with `_low`, `_high` and `_dual`, `tokens`, `sequences`; each where the loss
    has it. A batch without a counted token gives 0 everywhere.
    """
    if isinstance(loss, Cotangents):
        value, derivatives = apply(loss, batch, outputs)
        return LossValue(value, derivatives, {})
    formula = _POLICY_TERMS.get(type(loss))  # type: ignore[arg-type]
    if formula is None or not isinstance(loss, FormulaLoss):
        raise InvalidRequestError(
            f"{type(loss).__name__} can't be evaluated by a backend; it takes "
            f"{', '.join(sorted(each.__name__ for each in _POLICY_TERMS))} or Cotangents"
        )
    tokens = Tokens.of(batch, outputs, loss.required_outputs)
    value, derivatives, pending = _combine(loss, tokens, formula(loss, tokens))
    return _on_host(tokens, value, derivatives, pending)


def _combine(
    loss: FormulaLoss, tokens: Tokens, policy: PolicyTerm
) -> tuple[Array, dict[str, Array], dict[str, Pending]]:
    weights = tokens.weights(loss.aggregation)
    if tokens.batch.importance_weights is not None:
        weights = weights * tokens.field("importance_weights")
    value = tokens.total(weights * policy.losses)
    slopes = weights * policy.slopes
    count = tokens.total(tokens.mask)
    derivatives: dict[str, Array] = {}
    pending = {"policy_loss": Pending("sum", value, count), **policy.metrics}
    if loss.kl is not None:
        estimates, estimate_slopes = estimate(loss.kl, tokens)
        weights = tokens.weights(loss.kl.aggregation)
        pending["kl_loss"] = Pending("sum", tokens.total(weights * estimates), count)
        value = value + loss.kl.coef * pending["kl_loss"].total
        slopes = slopes + loss.kl.coef * (weights * estimate_slopes)
    derivatives["logprobs"] = loss.scale * slopes
    if loss.entropy is not None:
        weights = tokens.weights(loss.entropy.aggregation)
        total = tokens.total(weights * tokens.outputs["entropy"])
        pending["entropy"] = Pending("sum", total, count)
        value = value - loss.entropy.coef * total
        derivatives["entropy"] = -loss.scale * loss.entropy.coef * weights
    return loss.scale * value, derivatives, pending


def _on_host(
    tokens: Tokens, value: Array, derivatives: dict[str, Array], pending: dict[str, Pending]
) -> LossValue:
    # every number in one transfer: a device is waited for once a call, not once a metric
    flat = [value, *(part for each in pending.values() for part in (each.total, each.weight))]
    numbers = tokens.xp.stack(flat).tolist()
    pairs = zip(numbers[1::2], numbers[2::2], strict=True)
    metrics = {
        name: Metric(how=each.how, total=total, weight=weight)
        for (name, each), (total, weight) in zip(pending.items(), pairs, strict=True)
    }
    size = float(tokens.batch.tokens)
    metrics["tokens"] = Metric(how="sum", total=size, weight=size)
    metrics["sequences"] = Metric(how="sum", total=float(tokens.batch.sequences), weight=size)
    return LossValue(numbers[0], derivatives, metrics)
