"""Shim (loop side, above the client): SkyRL's own loss, where no named one equals it.

Imports torch, SkyRL's losses and its worker's metrics, remote_rl and what all shims share of it
(`common.derivatives`). The policy loss is the function of SkyRL's registry; KL and entropy are
added as its worker does with the whole mini-batch as one micro-batch on one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry, compute_approx_kl
from skyrl.backends.skyrl_train.utils.torch_utils import masked_mean
from skyrl.backends.skyrl_train.workers.worker_utils import (
    compute_minibatch_rollout_logprob_diff_metrics,
)
from skyrl.train.config import AlgorithmConfig

from remote_rl import Outputs, Ragged, errors

from ..common.derivatives import OwnLoss, evaluate_own
from .batches import placed
from .losses import WITHOUT_TERMS


def needed_outputs(algorithm: AlgorithmConfig) -> frozenset[str]:
    """What a forward has to compute for SkyRL's loss: `entropy` too, where it is only reported,
    as SkyRL's worker does."""
    if algorithm.policy_loss_type in WITHOUT_TERMS:
        return frozenset({"logprobs"})
    return frozenset({"logprobs", "entropy"})


def evaluate_own_loss(
    algorithm: AlgorithmConfig, rows: TrainingInputBatch, outputs: Outputs
) -> OwnLoss:
    """SkyRL's loss of the mini-batch `rows`, and its derivatives by those outputs that it is a
    function of: `logprobs`, and `entropy` with `use_entropy_loss`.

    rows: SkyRL's, with `loss_mask`. outputs: of the rows, see `needed_outputs`. The metrics are
    SkyRL's worker's, but for what is not of the loss (`metrics.mini_batch_metrics` adds it).
    Raises `InvalidRequestError` where the loss depends on no output, or a field that it needs is
    missing.
    """
    if _has_kl(algorithm) and rows.get("base_action_log_probs") is None:
        raise errors.InvalidRequestError(
            "trainer.algorithm.use_kl_loss=True needs the reference's logprobs, and these rows "
            "have no base_action_log_probs",
            field="base_action_log_probs",
        )
    known = {name: _tensor(outputs[name]) for name in needed_outputs(algorithm)}

    def evaluate(leaves: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, Mapping[str, Any]]:
        given = {name: placed(flat, rows) for name, flat in {**known, **leaves}.items()}
        policy, metrics = _policy_loss(algorithm, rows, given["logprobs"])
        if algorithm.policy_loss_type in WITHOUT_TERMS:
            return policy, {}
        terms, reported = _further_terms(algorithm, rows, given)
        reported["policy_loss"] = float(policy.detach())
        return policy + terms, reported | _reported(metrics, rows, given["logprobs"])

    by = {"logprobs", "entropy"} if _has_entropy(algorithm) else {"logprobs"}
    return evaluate_own(evaluate, outputs, by, name=algorithm.policy_loss_type)


def policy_metrics(
    algorithm: AlgorithmConfig, rows: TrainingInputBatch, logprobs: Ragged
) -> dict[str, Any]:
    """What SkyRL's worker reports of the policy loss at these logprobs: `loss_metrics/*`, and
    where the sampler gave logprobs `minibatch_rollout_logprobs_abs_diff_*`."""
    with torch.no_grad():
        given = placed(_tensor(logprobs), rows)
        return _reported(_policy_loss(algorithm, rows, given)[1], rows, given)


def _policy_loss(
    algorithm: AlgorithmConfig, rows: TrainingInputBatch, logprobs: torch.Tensor
) -> tuple[torch.Tensor, Mapping[str, Any]]:
    function = PolicyLossRegistry.get(algorithm.policy_loss_type)
    loss, metrics = function(
        logprobs,
        rows.get("action_log_probs"),
        rows.get("advantages"),
        config=algorithm,
        loss_mask=rows["loss_mask"],
        rollout_logprobs=rows.get("rollout_logprobs"),
    )
    return loss, metrics


def _further_terms(
    algorithm: AlgorithmConfig, rows: TrainingInputBatch, given: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, Any]]:
    mask, total = rows["loss_mask"], torch.tensor(0.0)
    entropy = masked_mean(given["entropy"], mask)
    reported = {"policy_entropy": float(entropy.detach())}
    if _has_entropy(algorithm):
        total = total - algorithm.entropy_loss_coef * entropy
    if _has_kl(algorithm):
        estimates = compute_approx_kl(
            given["logprobs"],
            rows["base_action_log_probs"],
            loss_mask=mask,
            kl_estimator_type=algorithm.kl_estimator_type,
        )
        divergence = masked_mean(estimates, mask, dim=-1).mean()
        reported["policy_kl"] = float(divergence.detach())
        total = total + algorithm.kl_loss_coef * divergence
    return total, reported


def _reported(
    metrics: Mapping[str, Any], rows: TrainingInputBatch, logprobs: torch.Tensor
) -> dict[str, Any]:
    differences: dict[str, Any] = compute_minibatch_rollout_logprob_diff_metrics(
        logprobs.detach(), rows.get("rollout_logprobs"), rows["loss_mask"]
    )
    return {f"loss_metrics/{name}": value for name, value in metrics.items()} | differences


def _has_entropy(algorithm: AlgorithmConfig) -> bool:
    return algorithm.use_entropy_loss and algorithm.policy_loss_type not in WITHOUT_TERMS


def _has_kl(algorithm: AlgorithmConfig) -> bool:
    return algorithm.use_kl_loss and algorithm.policy_loss_type not in WITHOUT_TERMS


def _tensor(rows: Ragged) -> torch.Tensor:
    return torch.tensor(rows.values)
