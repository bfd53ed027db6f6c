"""Shim (loop side, above the client): verl's own loss, where no named one equals it.

Imports attrs, torch, verl's `ppo_loss` and remote_rl. The function runs here, on the outputs of a
forward; its derivatives are sent as cotangents. A whole mini-batch is one micro-batch to it, and
its random numbers are those of this process's torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.utils.metric import Metric
from verl.workers.utils.losses import ppo_loss

from remote_rl import Outputs, Ragged, errors

from .batches import ragged, sequence_slots


@attrs.frozen(kw_only=True)
class OwnLoss:
    """value: verl's loss of the mini-batch. derivatives: output name to Ragged[n] float32. metrics:
    by verl's names. version: of the weights whose outputs it was computed from."""

    value: float
    derivatives: Mapping[str, Ragged]
    metrics: Mapping[str, float]
    version: int

    @property
    def finite(self) -> bool:
        """Whether the derivatives are numbers, so that there is a gradient to send."""
        return all(bool(np.isfinite(rows.values).all()) for rows in self.derivatives.values())


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
    names = sorted(needed_outputs(entropy))
    leaves = {name: torch.tensor(outputs[name].values, requires_grad=True) for name in names}
    data = rows.copy()
    tensordict_utils.assign_non_tensor(
        data, dp_size=1, batch_num_tokens=tokens, global_batch_size=sequences
    )
    value, metrics = ppo_loss(actor, _in_sequences(rows, leaves), data)
    if not value.requires_grad:
        raise errors.InvalidRequestError(
            f"the policy loss {actor.policy_loss.loss_mode!r} depends on no output of the model, "
            "so it has no gradient; look for detach(), item() or no_grad() in it"
        )
    slopes = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    return OwnLoss(
        value=float(value.detach()),
        derivatives={
            name: outputs[name].with_values(
                np.zeros(len(leaf), np.float32) if slope is None else slope.numpy()
            )
            for (name, leaf), slope in zip(leaves.items(), slopes, strict=True)
        },
        metrics={name: _number(metric) for name, metric in metrics.items()},
        version=outputs.version,
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
