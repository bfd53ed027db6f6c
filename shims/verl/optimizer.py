"""Shim (loop side, above the client): verl's optimizer section as AdamW, with verl's own schedule.

Imports torch, verl.utils.torch_functional, remote_rl and what all shims share.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from verl.utils.torch_functional import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
)

from remote_rl import AdamW, errors

from ..common.schedules import Schedule

_OPTIM = "actor_rollout_ref.actor.optim"
_OVERRIDABLE = ("lr", "betas", "eps", "weight_decay")
#: arguments of torch.optim.AdamW that choose an implementation of the same formula
_IMPLEMENTATIONS = ("foreach", "fused", "capturable")
#: arguments of torch.optim.AdamW that change the formula, with the only value that keeps it
_FIXED = {"amsgrad": False, "maximize": False, "differentiable": False}


class Optimizer(Schedule):
    """AdamW for the next step, and the learning-rate schedule that moves it.

    optim: verl's `FSDPOptimizerConfig`, its `total_training_steps` filled in by the trainer. It is
    moved after the last mini-batch of an update.
    """

    def __init__(self, optim: Any) -> None:
        self._constants = constants(optim)
        super().__init__(self._constants.pop("lr"), partial(_scheduler, optim))

    def adamw(self) -> AdamW:
        """The next step's optimizer."""
        return AdamW(lr=self.lr, **self._constants)


def constants(optim: Any) -> dict[str, Any]:
    """AdamW's fields, `lr` among them, from verl's section and its `override_optimizer_config`."""
    fields: dict[str, Any] = {
        "lr": optim.lr,
        "betas": tuple(optim.betas),
        "weight_decay": optim.weight_decay,
        "max_grad_norm": _max_grad_norm(optim),
    }
    for name, value in (optim.override_optimizer_config or {}).items():
        if name in _OVERRIDABLE:
            fields[name] = tuple(value) if name == "betas" else value
        elif name in _IMPLEMENTATIONS or (name in _FIXED and value == _FIXED[name]):
            continue
        else:
            raise errors.UnsupportedError(
                f"{_OPTIM}.override_optimizer_config.{name}={value!r} is not supported: "
                f"remote_rl's AdamW has {', '.join(_OVERRIDABLE)}; leave it out",
                key=f"{_OPTIM}.override_optimizer_config.{name}",
            )
    return fields


def _max_grad_norm(optim: Any) -> float:
    deprecated = optim.get("grad_clip", None)
    value = optim.clip_grad if deprecated is None else deprecated
    if value is None or value <= 0:
        raise errors.UnsupportedError(
            f"{_OPTIM}.clip_grad={value!r} is not supported: verl always clips; "
            "give a positive norm (a large one never clips)",
            key=f"{_OPTIM}.clip_grad",
        )
    return float(value)


def _scheduler(optim: Any, scheduled: torch.optim.Optimizer) -> Any:
    # as verl's FSDPEngine._build_lr_scheduler
    total, warmup = optim.total_training_steps, optim.lr_warmup_steps
    if warmup is None or warmup <= 0:
        warmup = int(optim.lr_warmup_steps_ratio * total)
    kind = optim.get("warmup_style", None) or optim.lr_scheduler_type
    if kind == "constant":
        return get_constant_schedule_with_warmup(scheduled, num_warmup_steps=warmup)
    if kind != "cosine":
        raise errors.UnsupportedError(
            f"{_OPTIM}.lr_scheduler_type={kind!r} is not supported; set constant or cosine",
            key=f"{_OPTIM}.lr_scheduler_type",
        )
    return get_cosine_schedule_with_warmup(
        scheduled,
        num_warmup_steps=warmup,
        num_training_steps=total,
        min_lr_ratio=optim.min_lr_ratio,
        num_cycles=optim.num_cycles,
        zero_indexed_step=optim.zero_indexed_step,
    )
