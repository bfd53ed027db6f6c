"""Rollouts as columns, and the two layouts in which verl sends them to a worker.

Columns are dense: prompts padded on the left to one width P, everything else on the right to R.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.workers.utils.padding import no_padding_2_padding, response_from_nested

Columns = dict[str, torch.Tensor]

_PADDING = 0


@attrs.frozen
class Rollout:
    """prompt, response: token ids. logprobs: of the response, by the sampler. group: which prompt.
    score: its reward."""

    prompt: list[int]
    response: list[int]
    logprobs: list[float]
    group: str
    score: float


def columns(rollouts: Sequence[Rollout], prompt_width: int, response_width: int) -> Columns:
    """prompts [B, P]; responses, response_mask, rollout_log_probs, rm_scores [B, R]; input_ids,
    attention_mask, position_ids [B, P + R]. The score is on the last token."""

    def left(row: list[int]) -> list[int]:
        return [_PADDING] * (prompt_width - len(row)) + row

    def right(row: list[Any]) -> list[Any]:
        return row + [_PADDING] * (response_width - len(row))

    prompts = torch.tensor([left(each.prompt) for each in rollouts])
    responses = torch.tensor([right(each.response) for each in rollouts])
    real = torch.tensor([right([1] * len(each.response)) for each in rollouts])
    mask = torch.cat([torch.tensor([left([1] * len(e.prompt)) for e in rollouts]), real], dim=1)
    scores = [right([0.0] * (len(each.response) - 1) + [each.score]) for each in rollouts]
    return {
        "prompts": prompts,
        "responses": responses,
        "response_mask": real,
        "rollout_log_probs": torch.tensor([right(each.logprobs) for each in rollouts]).float(),
        "rm_scores": torch.tensor(scores).float(),
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
    }


class Padded:
    """The layout that the seam came with: only `input_ids` and `position_ids` are jagged, all else
    stays dense beside `attention_mask`."""

    def send(self, dense: Columns, meta: Mapping[str, Any]) -> TensorDict:
        mask = dense["attention_mask"].bool()
        tensors = dict(dense)
        for name in ("input_ids", "position_ids"):
            tensors[name] = _jagged(dense[name], mask)
        tensors["loss_mask"] = tensors["response_mask"]
        widths = {"max_seq_len": mask.shape[1], "max_response_len": dense["responses"].shape[1]}
        indices = mask.flatten().nonzero().flatten()
        return tensordict_utils.get_tensordict(tensors, {**meta, **widths, "indices": indices})

    def receive(self, values: torch.Tensor, sent: TensorDict) -> torch.Tensor:
        return no_padding_2_padding(values, sent)


class Jagged:
    """The layout of the V1 trainer: everything is jagged, nothing is padded."""

    def send(self, dense: Columns, meta: Mapping[str, Any]) -> TensorDict:
        mask = dense["attention_mask"].bool()
        width = dense["prompts"].shape[1]
        tensors: Columns = {}
        for name, tensor in dense.items():
            if name in ("input_ids", "position_ids"):
                tensors[name] = _jagged(tensor, mask)
            elif name == "prompts":
                tensors[name] = _jagged(tensor, mask[:, :width])
            elif name != "attention_mask":
                tensors[name] = _jagged(tensor, mask[:, width:])
        tensors["loss_mask"] = tensors["response_mask"]
        return tensordict_utils.get_tensordict(tensors, dict(meta))

    def receive(self, values: torch.Tensor, sent: TensorDict) -> torch.Tensor:
        rows = response_from_nested(values, sent["response_mask"])
        return torch.nested.to_padded_tensor(rows, 0.0)


def _jagged(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    rows = [row[keep] for row, keep in zip(tensor, mask, strict=True)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
