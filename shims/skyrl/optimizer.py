"""Shim (loop side, above the client): SkyRL's optimizer section as AdamW, with SkyRL's schedule.

Imports transformers' schedules, which SkyRL uses, remote_rl and what all shims share.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from skyrl.train.config.config import OptimizerConfig
from transformers import SchedulerType, get_scheduler

from remote_rl import AdamW

from ..common.rules import refuse
from ..common.schedules import Schedule

_PATH: Final = "trainer.policy.optimizer_config"


class Optimizer(Schedule):
    """AdamW for the next step, and the learning-rate schedule that moves it.

    section: SkyRL's `trainer.policy.optimizer_config`. steps: optimizer steps of the whole
    training. It is moved after every step that was not skipped, as SkyRL's strategy moves it
    (`fsdp_strategy.py::optimizer_step`).
    """

    def __init__(self, section: OptimizerConfig, steps: int | None) -> None:
        self._constants = constants(section)
        super().__init__(section.lr, partial(_scheduler, section, steps))

    def adamw(self) -> AdamW:
        """The next step's optimizer."""
        return AdamW(lr=self.lr, **self._constants)


def constants(section: OptimizerConfig) -> dict[str, Any]:
    """AdamW's fields but `lr`; eps is torch's default, which SkyRL leaves alone.

    Raises `UnsupportedError` for a schedule that no rate alone describes.
    """
    if section.scheduler not in {each.value for each in SchedulerType}:
        known = ", ".join(sorted(each.value for each in SchedulerType))
        refuse(f"{_PATH}.scheduler", section.scheduler, f"the known ones are {known}")
    if section.scheduler == SchedulerType.REDUCE_ON_PLATEAU.value:
        refuse(
            f"{_PATH}.scheduler",
            section.scheduler,
            "it needs a measure at every step, which SkyRL does not give it either; set another",
        )
    norm = section.max_grad_norm
    return {
        "betas": tuple(section.adam_betas),
        "eps": 1e-8,
        "weight_decay": section.weight_decay,
        "max_grad_norm": norm if norm > 0 else None,
    }


def _scheduler(
    section: OptimizerConfig, steps: int | None, scheduled: torch.optim.Optimizer
) -> Any:
    return get_scheduler(
        section.scheduler,
        scheduled,
        num_warmup_steps=section.num_warmup_steps,
        num_training_steps=steps,
    )
