"""The mock's policy in torch with autograd, to apply a framework's own loss to.

Imports numpy, torch, the mock's windows and remote_rl.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from backends.mock.model import NO_TOKEN, batch_windows
from remote_rl import Batch


def policy_outputs(weights: Mapping[str, torch.Tensor], batch: Batch) -> dict[str, torch.Tensor]:
    """The mock's `logprobs` and `entropy`, [response tokens] float64, by autograd's rules."""
    window = weights["model.window.weight"]
    windows = torch.from_numpy(batch_windows(batch, window.shape[1])).long()
    embedded = weights["model.embed_tokens.weight"][windows.clamp(min=0)]
    embedded = embedded * (windows != NO_TOKEN)[..., None]
    inputs = torch.einsum("tkd,hkd->th", embedded, window) + weights["model.window.bias"]
    scores = torch.tanh(inputs) @ weights["lm_head.weight"].T + weights["lm_head.bias"]
    temperature = torch.from_numpy(np.repeat(batch.temperature, batch.responses.lengths))
    table = torch.log_softmax(scores / temperature[:, None].double(), dim=-1)
    tokens = torch.from_numpy(batch.responses.values.astype(np.int64))
    return {
        "logprobs": table.gather(1, tokens[:, None])[:, 0],
        "entropy": -(table.exp() * table).sum(dim=-1),
    }
