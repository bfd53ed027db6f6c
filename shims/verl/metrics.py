"""Shim (loop side, above the client): results of the update under verl's metric names.

Imports remote_rl's types. Each value is one mini-batch's; verl reduces the lists by mean, or by max
or min where a name says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remote_rl.types import ForwardBackwardResult, OptimStepResult

#: remote_rl's metric -> verl's; others keep their name
_NAMES: Mapping[str, str] = {
    "policy_loss": "actor/pg_loss",
    "clip_fraction": "actor/pg_clipfrac",
    "clip_fraction_dual": "actor/pg_clipfrac_lower",
    "approximate_kl_k1": "actor/ppo_kl",
    "entropy": "actor/entropy_loss",
    "kl_loss": "kl_loss",
}

#: verl pops `mfu` without a default. The model's FLOPs and the accelerators' peak are known to the
#: server alone, so the honest number here is none: 0.
_UNKNOWN_MFU = 0.0


def mini_batch_metrics(
    gradient: ForwardBackwardResult, step: OptimStepResult, actor: Any
) -> dict[str, float]:
    """One mini-batch's metrics, by the names of stock verl's actor."""
    values = {_NAMES.get(name, name): value for name, value in gradient.metrics.items()}
    values |= {"loss": gradient.value, "grad_norm": step.grad_norm, "mfu": _UNKNOWN_MFU}
    if actor.use_kl_loss:
        values["kl_coef"] = actor.kl_loss_coef
    return values


def collect(rows: list[dict[str, float]], lr: float | None) -> dict[str, list[float]]:
    """The mini-batches' metrics as lists, and the learning rate after the schedule's step."""
    lists: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            lists.setdefault(name, []).append(value)
    if lr is not None:
        lists["lr"] = [lr]
    return lists
