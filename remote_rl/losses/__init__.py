"""Losses: specifications that travel as data, and their one implementation (imports numpy, attrs,
array-api-compat, remote_rl.types, remote_rl.errors).

Say what to optimise with `PPO`, `CISPO`, `ImportanceSampling`, `Reinforce`, `CrossEntropy`, or any
function of your own with `custom`. Backends call `resolve` and `evaluate`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .aggregation import (
    Aggregation,
    sequence_mean_token_mean,
    sequence_mean_token_sum,
    sequence_mean_token_sum_norm,
    token_mean,
    token_sum,
)
from .base import Loss
from .cotangents import Cotangents
from .custom import Custom, custom, run_custom
from .spec import CISPO, PPO, CrossEntropy, FormulaLoss, ImportanceSampling, Reinforce
from .terms import KL, Entropy

if TYPE_CHECKING:
    from .batch import LossBatch, segment_sum
    from .evaluation import LossValue, evaluate, resolve
    from .metrics import Metric, merge_metrics, metric_values

sum = token_sum  # losses.sum(); not in __all__, where it would replace the builtin

#: what only a backend needs, and its array namespaces with it, is imported on first use
_ON_FIRST_USE = {
    "LossBatch": "batch",
    "segment_sum": "batch",
    "LossValue": "evaluation",
    "evaluate": "evaluation",
    "resolve": "evaluation",
    "Metric": "metrics",
    "merge_metrics": "metrics",
    "metric_values": "metrics",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module 'remote_rl.losses' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f".{_ON_FIRST_USE[name]}", __name__), name)
    globals()[name] = value
    return value


#: name on the wire -> class, of every loss that a backend can be sent
LOSSES: Mapping[str, type[Loss]] = MappingProxyType(
    {
        each.name: each
        for each in (PPO, CISPO, ImportanceSampling, Reinforce, CrossEntropy, Cotangents)
    }
)

__all__ = [
    "CISPO",
    "KL",
    "LOSSES",
    "PPO",
    "Aggregation",
    "Cotangents",
    "CrossEntropy",
    "Custom",
    "Entropy",
    "FormulaLoss",
    "ImportanceSampling",
    "Loss",
    "LossBatch",
    "LossValue",
    "Metric",
    "Reinforce",
    "custom",
    "evaluate",
    "merge_metrics",
    "metric_values",
    "resolve",
    "run_custom",
    "segment_sum",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_sum_norm",
    "token_mean",
    "token_sum",
]
