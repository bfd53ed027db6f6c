"""A trainer made of ranks, and the same in plain PyTorch, for tests to compare: both take whole
batches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import arctic_ranks
import numpy as np
import torch
from arctic_oracle import plain_gradients, plain_outputs
from arctic_ranks import Ranks
from transformers import AutoModelForCausalLM

from backends.arctic.plan import shares
from remote_rl.losses import Loss, merge_metrics, metric_values, resolve
from remote_rl.types import AdamW, Batch

#: takes the gradient as it is for the first moment, and moves nothing
MEASURE = AdamW(lr=0.0, betas=(0.0, 0.999), weight_decay=0.0)
#: an eps that no rounding error of a gradient is large beside: with a tiny one, AdamW moves what
#: has a gradient of nearly 0 by its sign
STEADY = AdamW(lr=0.01, eps=0.5)


class Trainer:
    """Ranks that are given whole batches, cut by the backend's own plan."""

    def __init__(self, ranks: Ranks, token_budget: int = 40) -> None:
        self.ranks = ranks
        self._budget = token_budget

    def forward_backward(self, batch: Batch, loss: Loss) -> tuple[float, dict[str, float]]:
        resolved = resolve(loss, batch)
        answers = self.ranks.call_each(
            "forward_backward",
            [
                (batch.select(share.rows), share.pieces, resolved.select(share.rows))
                for share in shares(batch, self.ranks.world, self._budget)
            ],
        )
        metrics = metric_values(merge_metrics(each.metrics for each in answers))
        return sum(each.value for each in answers), metrics

    def forward(self, batch: Batch, policy: str = "current") -> dict[str, np.ndarray]:
        plan = shares(batch, self.ranks.world, self._budget)
        names = frozenset({"logprobs", "entropy"})
        answers = self.ranks.call_each(
            "forward",
            [(batch.select(share.rows), share.pieces, names, policy) for share in plan],
        )
        result = {name: np.zeros(len(batch.responses.values), np.float32) for name in names}
        for share, answer in zip(plan, answers, strict=True):
            places = [
                np.arange(batch.responses.offsets[row], batch.responses.offsets[row + 1])
                for row in share.rows
            ]
            for name, column in result.items():
                if places:
                    column[np.concatenate(places)] = answer[name]
        return result

    def step(self, options: AdamW) -> Any:
        answers = self.ranks.call("optim_step", options)
        assert len(set(map(repr, answers))) == 1, "ranks disagree"
        return answers[0]

    def gradients(self) -> dict[str, torch.Tensor]:
        """What has been accumulated, which is gone afterwards; nothing moves but moments."""
        self.step(MEASURE)
        return tensors(self.ranks.call(arctic_ranks.moments, "exp_avg")[0])

    def weights(self) -> dict[str, torch.Tensor]:
        return tensors(self.ranks.call(arctic_ranks.masters)[0])


class Plain:
    """The same without DeepSpeed: a whole model, torch.optim.AdamW, torch's own clipping."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0)
        self._total: dict[str, torch.Tensor] = {}

    def forward_backward(self, batch: Batch, loss: Loss) -> None:
        self.add(plain_gradients(self.model, batch, loss))

    def add(self, gradients: Mapping[str, torch.Tensor]) -> None:
        for name, gradient in gradients.items():
            self._total[name] = self._total.get(name, 0) + gradient

    def step(self, options: AdamW) -> float:
        for name, parameter in self.model.named_parameters():
            parameter.grad = self._total[name]
        most = options.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), torch.inf if most is None else most
        )
        for group in self._optimizer.param_groups:
            group.update(
                lr=options.lr,
                betas=options.betas,
                eps=options.eps,
                weight_decay=options.weight_decay,
            )
        self._optimizer.step()
        self._total = {}
        return float(norm)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: each.detach().clone() for name, each in self.model.named_parameters()}

    def outputs(self, batch: Batch) -> dict[str, np.ndarray]:
        with torch.no_grad():
            return {name: each.numpy() for name, each in plain_outputs(self.model, batch).items()}


def tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def same(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )
