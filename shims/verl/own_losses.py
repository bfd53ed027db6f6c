"""Shim (loop side, above the client): verl's own loss, where no named one equals it.

Imports torch, verl's `ppo_loss` and remote_rl. The function runs on the client, on the outputs that
a forward returned; its derivatives are sent as cotangents (`losses.custom`). A whole mini-batch is
one micro-batch to it.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.utils.metric import Metric
from verl.workers.utils.losses import ppo_loss

from remote_rl import Batch, losses

from .batches import ragged, sequence_slots


def build_own_loss(
    actor: Any, rows: TensorDict, *, tokens: int, sequences: int, entropy: bool
) -> losses.Custom:
    """verl's `ppo_loss` on the mini-batch `rows`, as a loss of remote_rl.

    actor: verl's actor dataclass. tokens, sequences, entropy: as in `losses.build_loss`.
    """
    names = {"logprobs": "log_probs"} | ({"entropy": "entropy"} if entropy else {})
    prompts, responses = ragged(rows, "prompts"), ragged(rows, "responses")
    offsets, slots = (torch.from_numpy(each) for each in sequence_slots(prompts, responses))
    data = rows.copy()
    tensordict_utils.assign_non_tensor(
        data, dp_size=1, batch_num_tokens=tokens, global_batch_size=sequences
    )

    def loss(_: Batch, outputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        placed = {
            theirs: torch.nested.nested_tensor_from_jagged(
                torch.zeros(int(offsets[-1])).index_copy(0, slots, outputs[ours]), offsets=offsets
            )
            for ours, theirs in names.items()
        }
        value, metrics = ppo_loss(actor, placed, data)
        return value, {name: _number(metric) for name, metric in metrics.items()}

    return losses.custom(loss, outputs=names)


def _number(metric: Any) -> float:
    return float(metric.aggregate() if isinstance(metric, Metric) else metric)
