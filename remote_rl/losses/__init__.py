"""Losses: specifications that travel as data, and their one implementation (imports numpy, attrs,
array-api-compat, remote_rl.types, remote_rl.errors).

Say what to optimise with `PPO`, `CISPO`, `ImportanceSampling`, `Reinforce`, `CrossEntropy`, or any
function of your own with `custom`. Backends call `resolve` and `evaluate`.
"""

from collections.abc import Mapping
from types import MappingProxyType

from .aggregation import (
    Aggregation,
    sequence_mean_token_mean,
    sequence_mean_token_sum,
    sequence_mean_token_sum_norm,
    token_mean,
    token_sum,
)
from .base import Loss
from .batch import LossBatch, segment_sum
from .cotangents import Cotangents
from .custom import Custom, custom, run_custom
from .evaluation import LossValue, evaluate, resolve
from .metrics import Metric, merge_metrics, metric_values
from .spec import CISPO, PPO, CrossEntropy, FormulaLoss, ImportanceSampling, Reinforce
from .terms import KL, Entropy

sum = token_sum

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
    "sum",
    "token_mean",
    "token_sum",
]
