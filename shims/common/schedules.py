"""Shim (loop side, above the client): a framework's own learning-rate schedule.

Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


class Schedule:
    """The rate of the next optimizer step, moved by one of torch's schedulers.

    lr: the base rate. build: from the torch optimizer whose rate it moves to the scheduler, as the
    framework builds it.
    """

    def __init__(self, lr: float, build: Callable[[torch.optim.Optimizer], Any]) -> None:
        holder = torch.nn.Parameter(torch.zeros(1))  # a scheduler needs an optimizer to move
        self._scheduled = torch.optim.SGD([holder], lr=lr)
        self._scheduler = build(self._scheduled)

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return float(self._scheduler.get_last_lr()[0])

    def advance(self) -> float:
        """One step of the schedule; the new rate."""
        self._scheduled.step()  # moves nothing, there is no gradient; torch wants this order
        self._scheduler.step()
        return self.lr

    def state(self) -> dict[str, Any]:
        """The schedule's state as JSON values, for a checkpoint's metadata."""
        return {
            name: value
            for name, value in self._scheduler.state_dict().items()
            if name in ("base_lrs", "last_epoch", "_step_count", "_last_lr")
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint's schedule."""
        self._scheduler.load_state_dict({**self._scheduler.state_dict(), **state})
