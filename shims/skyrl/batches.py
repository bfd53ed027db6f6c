"""Shim (loop side, above the client): SkyRL's `TrainingInputBatch` to `Batch`, and outputs back.

Imports numpy, torch, SkyRL's batch type and remote_rl. Values are moved, never recomputed: tokens,
masks and logprobs that SkyRL hands over are the ones that are sent. SkyRL's rows are padded on the
left as a whole: `sequences` and `attention_mask` are [B, S], and every per-token field [B, A] lies
over the last A columns of them, so that responses end where the rows do. What is a response token
for remote_rl is `response_mask`; what counts in the loss is `loss_mask`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch

from remote_rl import Batch, Ragged, errors

#: SkyRL's per-token fields [B, A] -> Batch's
_TRAINING_FIELDS: Mapping[str, str] = {
    "advantages": "advantages",
    "action_log_probs": "old_logprobs",
    "base_action_log_probs": "ref_logprobs",
    "rollout_logprobs": "sampling_logprobs",
}

_NO_ROUTES = "set generator.inference_engine.enable_return_routed_experts=false"
#: fields that no Batch can carry -> what to do
_REFUSED: Mapping[str, str] = {
    "rollout_expert_indices": _NO_ROUTES,
    "router_padding_mask": _NO_ROUTES,
    "rollout_sample_support": "set trainer.algorithm.enable_sample_support_replay=false and "
    "generator.inference_engine.enable_return_sample_support_set=false",
    "pixel_values": "train on text alone",
    "image_grid_thw": "train on text alone",
    "sub_seq_lengths": "leave every sequence a row of its own",
}


def to_batch(data: TrainingInputBatch, *, temperature: float, training: bool = False) -> Batch:
    """The rows of `data`, equal prompts sent once.

    data: `sequences` and `attention_mask` [B, S], and `response_mask` [B, A], without which
    `response_positions` says what a response is. For training also `loss_mask` [B, A], where
    anything but 0 counts, and each where it is not None: `advantages` (SkyRL has scaled them by
    its loss reduction), `action_log_probs`, `base_action_log_probs`, `rollout_logprobs` [B, A].
    temperature: of the logprobs.

    Raises `UnsupportedError` for a field that can't be carried, `InvalidRequestError` for rows in
    another layout, both by SkyRL's name of the field.
    """
    _refuse_attachments(data)
    positions, sequences = response_positions(data), data["sequences"].numpy()
    attended = data["attention_mask"].bool().numpy()
    answered = np.zeros_like(attended)
    answered[:, attended.shape[1] - positions.shape[1] :] = positions.numpy()
    fields: dict[str, Any] = {}
    if training:
        fields["mask"] = _ragged("loss_mask", _counted(data, positions), positions)
        for theirs, ours in _TRAINING_FIELDS.items():
            if data.get(theirs) is not None:
                fields[ours] = _ragged(theirs, data[theirs].float(), positions)
    return Batch(
        prompts=Ragged.from_padded(sequences, attended & ~answered),
        prompt_index=np.arange(len(sequences), dtype=np.int32),
        responses=Ragged.from_padded(sequences, answered),
        temperature=temperature,
        **fields,
    ).share_prompts()


def to_ragged(data: TrainingInputBatch, name: str, values: torch.Tensor) -> Ragged:
    """`values` [B, A] of the response tokens of `data`. name: what an error calls them."""
    return _ragged(name, values, response_positions(data))


def _ragged(name: str, values: torch.Tensor, positions: torch.Tensor) -> Ragged:
    if values.shape != positions.shape:
        raise errors.InvalidRequestError(
            f"SkyRL sent {name} of shape {tuple(values.shape)} with responses of shape "
            f"{tuple(positions.shape)}; per-token fields are [rows, response_length]",
            field=name,
        )
    return Ragged.from_padded(values.detach().numpy(), positions.numpy())


def counted(data: TrainingInputBatch) -> torch.Tensor:
    """bool [B, A], where `loss_mask` is not 0; `InvalidRequestError` where that is no response
    token, or there is no `loss_mask`."""
    return _counted(data, response_positions(data))


def _counted(data: TrainingInputBatch, positions: torch.Tensor) -> torch.Tensor:
    if data.get("loss_mask") is None:
        raise errors.InvalidRequestError(
            "SkyRL sent rows without loss_mask, which says what counts in the loss; it comes with "
            "the generator's output",
            field="loss_mask",
        )
    mask: torch.Tensor = data["loss_mask"] != 0
    outside = mask & ~positions if mask.shape == positions.shape else torch.zeros(0)
    if outside.any():
        row = int(outside.any(dim=1).nonzero()[0])
        raise errors.InvalidRequestError(
            f"loss_mask of row {row} counts a token that response_mask says is none of the "
            "response; a loss is a function of response tokens alone",
            field="loss_mask",
            row=row,
        )
    return mask


def response_positions(data: TrainingInputBatch) -> torch.Tensor:
    """bool [B, A], where a response token stands: `response_mask`, which has to be one run at the
    end of each row.

    Rows without that field, as SkyRL's trainer sends them for logprobs, are responses over the
    whole of the last A columns as far as they are attended to, but for the row's first token:
    more than the true ones, which lie at the end of them.
    """
    attended = data["attention_mask"].bool()
    mask = data.get("response_mask")
    if mask is None:
        width = int(data.metadata["response_length"])
        return (attended & (attended.cumsum(dim=1) > 1))[:, attended.shape[1] - width :]
    found: torch.Tensor = mask.bool()
    seen = attended[:, attended.shape[1] - found.shape[1] :]
    broken = (found & ~seen).any(dim=1) | (found[:, :-1] & ~found[:, 1:]).any(dim=1)
    if broken.any():
        row = int(broken.nonzero()[0])
        raise errors.InvalidRequestError(
            f"response_mask of row {row} is not one run of attended tokens at the end of the row; "
            "the shim reads the layout of SkyRL 0.4.0's convert_prompts_responses_to_batch_tensors",
            field="response_mask",
            row=row,
        )
    return found


def padded(values: Ragged, width: int) -> torch.Tensor:
    """Per-response-token values as SkyRL has them: [n, width] float32, right-aligned, 0 where no
    response token stands."""
    return torch.from_numpy(values.to_padded(width=width, side="left").astype(np.float32))


def per_row(values: Ragged, data: TrainingInputBatch) -> list[list[float]]:
    """`padded` to the width of the per-token fields of `data`, a list a row."""
    rows: list[list[float]] = padded(values, response_positions(data).shape[1]).tolist()
    return rows


def placed(flat: torch.Tensor, data: TrainingInputBatch) -> torch.Tensor:
    """Values [total] of all response tokens, row after row, as [B, A] beside the per-token fields
    of `data`, 0 elsewhere; autograd goes through it."""
    positions = response_positions(data)
    return torch.zeros(positions.shape, dtype=flat.dtype).masked_scatter(positions, flat)


def _refuse_attachments(data: TrainingInputBatch) -> None:
    for name, advice in _REFUSED.items():
        if data.get(name) is not None:
            raise errors.UnsupportedError(
                f"the rows hold {name}, which remote_rl's Batch can't carry; {advice}", key=name
            )
