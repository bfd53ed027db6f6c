"""Shim (loop side, above the client): verl's own loss, where no named one equals it.

Imports torch, verl's `ppo_loss`, remote_rl and what all shims share of it (`common.derivatives`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.utils.metric import Metric
from verl.workers.utils.losses import ppo_loss

from remote_rl import Outputs

from ..common.derivatives import OwnLoss, evaluate_own
from .batches import ragged, sequence_slots


def needed_outputs(entropy: bool) -> frozenset[str]:
    """What verl's loss is a function of. entropy: verl's `calculate_entropy`."""
    return frozenset({"logprobs", "entropy"} if entropy else {"logprobs"})


def evaluate_own_loss(
    actor: Any, rows: TensorDict, outputs: Outputs, *, tokens: int, sequences: int, entropy: bool
) -> OwnLoss:
    """verl's `ppo_loss` on the mini-batch `rows`, and its derivatives.

    actor: verl's actor dataclass. outputs: of the rows, see `needed_outputs`. tokens, sequences,
    entropy: as in `losses.build_loss`. Raises `InvalidRequestError` where the loss depends on no
    output.
    """
    data = rows.copy()
    tensordict_utils.assign_non_tensor(
        data, dp_size=1, batch_num_tokens=tokens, global_batch_size=sequences
    )

    def evaluate(
        leaves: Mapping[str, torch.Tensor],
    ) -> tuple[torch.Tensor, Mapping[str, float]]:
        value, metrics = ppo_loss(actor, _in_sequences(rows, leaves), data)
        return value, {name: _number(metric) for name, metric in metrics.items()}

    return evaluate_own(
        evaluate, outputs, needed_outputs(entropy), name=actor.policy_loss.loss_mode
    )


def _in_sequences(rows: TensorDict, leaves: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    # as verl's engines return them: jagged [B, P + R], slot i scores token i + 1
    prompts, responses = ragged(rows, "prompts"), ragged(rows, "responses")
    offsets, slots = (torch.from_numpy(each) for each in sequence_slots(prompts, responses))
    theirs = {"logprobs": "log_probs", "entropy": "entropy"}
    return {
        theirs[name]: torch.nested.nested_tensor_from_jagged(
            torch.zeros(int(offsets[-1])).index_copy(0, slots, leaf), offsets=offsets
        )
        for name, leaf in leaves.items()
    }


def _number(metric: Any) -> float:
    return float(metric.aggregate() if isinstance(metric, Metric) else metric)
