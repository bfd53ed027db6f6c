"""Shim (loop side, above the client): results of a mini-batch under the names of SkyRL's worker.

Imports remote_rl's types and what the shim knows of SkyRL's losses. The values are the worker's
with the whole mini-batch as one micro-batch. All are there of a loss of SkyRL's own
(`own_losses`). A named loss is evaluated on the server, whose result holds no logprobs; what is a
function of them is the backend's metric of the same meaning, else missing:

* `minibatch_rollout_logprobs_abs_diff_*`: no metric of remote_rl compares with the sampler;
* `loss_metrics/cispo/ratio_clamped_mean`: CISPO has no metric of the clipped ratio.

Both are there where the caller has outputs of the weights that the gradient was taken at, as of the
first mini-batch after SkyRL's forward for old logprobs. Where no token counts, SkyRL's
`cispo/ratio_max` and `ratio_min` are those of its padding, here 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.train.config import AlgorithmConfig

from remote_rl import Outputs
from remote_rl.types import ForwardBackwardResult

from ..common.derivatives import OwnLoss
from .batches import response_positions
from .losses import WITHOUT_TERMS, off_policy_correction
from .own_losses import policy_metrics

_CLIPPED = {"clip_ratio": ("clip_fraction", 0.0)}
#: policy loss -> SkyRL's metric -> (remote_rl's, value where no token counts)
_POLICY_METRICS: Mapping[str, Mapping[str, tuple[str, float]]] = {
    "regular": _CLIPPED,
    "dual_clip": _CLIPPED,
    "gspo": _CLIPPED,
    "cispo": _CLIPPED
    | {
        "cispo/ratio_mean": ("ratio_mean", 0.0),
        "cispo/ratio_max": ("ratio_max", 1.0),
        "cispo/ratio_min": ("ratio_min", 1.0),
    },
    "importance_sampling": {"importance_ratio": ("ratio_mean", math.nan)},
}


def mini_batch_metrics(
    gradient: ForwardBackwardResult,
    rows: TrainingInputBatch,
    algorithm: AlgorithmConfig,
    lr: float,
    *,
    own: OwnLoss | None = None,
    outputs: Outputs | None = None,
) -> dict[str, Any]:
    """One mini-batch's metrics: `final_loss`, `policy_loss`, `policy_entropy`, `policy_kl`,
    `response_length`, `policy_lr`, `loss_metrics/*`, `minibatch_rollout_logprobs_abs_diff_*`; with
    cross_entropy `loss`, `response_length` and `lr`.

    gradient: of a named loss; ignored with `own`, of a loss that ran here. lr: of the step that
    follows. outputs: `logprobs` of the rows at the weights of `gradient`, where they are known.
    """
    value = gradient.value if own is None else own.value
    width = response_positions(rows).shape[1]
    if algorithm.policy_loss_type in WITHOUT_TERMS:
        return {"loss": value, "response_length": width, "lr": lr}
    found = {"final_loss": value, "response_length": width, "policy_lr": lr}
    if own is not None:
        return found | dict(own.metrics)
    return found | _named(gradient.metrics, rows, algorithm, outputs)


def _named(
    metrics: Mapping[str, float],
    rows: TrainingInputBatch,
    algorithm: AlgorithmConfig,
    outputs: Outputs | None,
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "policy_loss": metrics["policy_loss"],
        "policy_entropy": metrics["entropy"],
    }
    if algorithm.use_kl_loss:
        found["policy_kl"] = metrics["kl_loss"]
    if outputs is not None:
        return found | policy_metrics(algorithm, rows, outputs["logprobs"])
    names = _POLICY_METRICS[algorithm.policy_loss_type]
    policy = {theirs: metrics.get(ours, nothing) for theirs, (ours, nothing) in names.items()}
    correction = off_policy_correction(algorithm, rows)
    policy |= {} if correction is None else correction.metrics
    return found | {f"loss_metrics/{name}": value for name, value in policy.items()}
