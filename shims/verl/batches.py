"""Shim (loop side, above the client): verl's tensor dicts to `Batch`, and outputs back.

Imports torch, tensordict and remote_rl. Values are moved, never recomputed: tokens, masks and
logprobs that verl hands over are the ones that are sent. verl has two layouts, told apart by
`attention_mask` [B, P + R], which only the padded one has: jagged rows (the V1 trainer), or dense
ones, prompts padded on the left, responses and per-token fields on the right (the trainer before
it, which the RemoteBackend seam came with).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils

from remote_rl import Batch, Ragged, errors

Array = npt.NDArray[np.int64]

#: verl's per-token fields [R] -> Batch's
_TRAINING_FIELDS = {
    "advantages": "advantages",
    "old_log_probs": "old_logprobs",
    "ref_log_prob": "ref_logprobs",
    "rollout_is_weights": "importance_weights",
}


def to_batch(data: TensorDict, *, training: bool = False) -> Batch:
    """The rows of `data`, equal prompts sent once.

    data: `prompts` [B, P], `responses`, `response_mask` [B, R] in one of verl's two layouts, and
    `temperature`, one for all or [B]; for training also `advantages`, `old_log_probs` and, where
    verl has computed them, `ref_log_prob` and `rollout_is_weights` [B, R].
    """
    _refuse_attachments(data)
    rows = data.batch_size[0]
    fields: dict[str, Any] = {}
    if training:
        fields = {
            ours: ragged(data, theirs)
            for theirs, ours in _TRAINING_FIELDS.items()
            if theirs in data
        }
    return Batch(
        prompts=ragged(data, "prompts"),
        prompt_index=np.arange(rows, dtype=np.int32),
        responses=ragged(data, "responses"),
        mask=ragged(data, "response_mask"),
        temperature=_temperature(data),
        **fields,
    ).share_prompts()


def ragged(data: TensorDict, name: str) -> Ragged:
    """One field as rows without padding, whether torch holds it jagged, strided, dense beside
    `attention_mask` or, all rows being equally long, dense alone."""
    tensor = data[name]
    if tensor.is_nested and tensor.layout is not torch.jagged:
        return Ragged.from_rows(list(tensor.unbind()), what=name)
    if not tensor.is_nested and "attention_mask" in data:
        return Ragged.from_padded(tensor.numpy(), _real_tokens(data, name).numpy())
    return Ragged.of(tensor, what=name)


def _real_tokens(data: TensorDict, name: str) -> torch.Tensor:
    mask, prompts = data["attention_mask"], data["prompts"].shape[1]
    real = mask[:, :prompts] if name == "prompts" else mask[:, prompts:]
    if real.shape != data[name].shape:
        raise errors.InvalidRequestError(
            f"verl sent {name} of shape {tuple(data[name].shape)} with an attention_mask of shape "
            f"{tuple(mask.shape)} for prompts of width {prompts}; the shim reads verl 0.9.1's "
            "jagged rows, and the padded ones of its branch release/v0.7.1"
        )
    return real.bool()


def to_sequences(values: Ragged, batch_prompts: Ragged) -> torch.Tensor:
    """Per-response-token values as verl's jagged [B, P + R], float32: slot i scores token i + 1,
    slots that score no response token hold 0.

    batch_prompts: one prompt a row, in the rows' order.
    """
    offsets, slots = sequence_slots(batch_prompts, values)
    filled = np.zeros(int(offsets[-1]), np.float32)
    filled[slots] = values.values
    return torch.nested.nested_tensor_from_jagged(
        torch.from_numpy(filled), offsets=torch.from_numpy(offsets)
    )


def sequence_slots(prompts: Ragged, responses: Ragged) -> tuple[Array, Array]:
    """Where response tokens are scored in verl's flat [B, P + R]: its row offsets, int64 [B + 1],
    and each response token's slot, int64 [total], one before the token's own place."""
    offsets = np.zeros(len(prompts) + 1, np.int64)
    np.cumsum(prompts.lengths + responses.lengths, out=offsets[1:])
    starts = offsets[:-1] + prompts.lengths - 1 - responses.offsets[:-1]
    slots = np.arange(len(responses.values), dtype=np.int64)
    return offsets, slots + np.repeat(starts, responses.lengths)


def scalar(data: TensorDict, name: str, default: Any = None) -> Any:
    """A plain value that travels with a call."""
    return tensordict_utils.get(data, name, default)


def counted_tokens(data: TensorDict) -> int:
    """verl's `batch_num_tokens`: the sum of `loss_mask`, which rejection sampling leaves alone."""
    return int(ragged(data, "loss_mask").values.sum())


def _temperature(data: TensorDict) -> Any:
    value = scalar(data, "temperature")
    if value is None:
        raise errors.InvalidRequestError(
            "verl sent no temperature with this call; the shim follows verl 0.9.1's V1 trainer"
        )
    return value


def _refuse_attachments(data: TensorDict) -> None:
    for inputs in scalar(data, "multi_modal_inputs", None) or ():
        if inputs:
            raise errors.UnsupportedError(
                "a row holds multi_modal_inputs, which remote_rl's Batch can't carry yet; "
                "train on text alone"
            )
