"""Shim (loop side, above the client): verl's optimizer section as AdamW, with verl's own schedule.

Imports torch, verl.utils.torch_functional and remote_rl.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from verl.utils.torch_functional import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
)

from remote_rl import AdamW, errors

_OPTIM = "actor_rollout_ref.actor.optim"
_OVERRIDABLE = ("lr", "betas", "eps", "weight_decay")
#: arguments of torch.optim.AdamW that choose an implementation of the same formula
_IMPLEMENTATIONS = ("foreach", "fused", "capturable")
#: arguments of torch.optim.AdamW that change the formula, with the only value that keeps it
_FIXED = {"amsgrad": False, "maximize": False, "differentiable": False}


class Optimizer:
    """AdamW for the next step, and the learning-rate schedule that moves it.

    optim: verl's `FSDPOptimizerConfig`, its `total_training_steps` filled in by the trainer.
    """

    def __init__(self, optim: Any) -> None:
        self._constants = constants(optim)
        holder = torch.nn.Parameter(torch.zeros(1))  # a schedule needs an optimizer to move
        lr = self._constants.pop("lr")
        self._scheduled = torch.optim.SGD([holder], lr=lr)
        self._schedule = _schedule(optim, self._scheduled)

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return float(self._schedule.get_last_lr()[0])

    def adamw(self) -> AdamW:
        """The next step's optimizer."""
        return AdamW(lr=self.lr, **self._constants)

    def advance(self) -> float:
        """One step of the schedule, after the last mini-batch of an update; the new rate."""
        self._scheduled.step()  # moves nothing, there is no gradient; torch wants this order
        self._schedule.step()
        return self.lr

    def state(self) -> dict[str, Any]:
        """The schedule's state as JSON values, for a checkpoint's metadata."""
        return {
            name: value
            for name, value in self._schedule.state_dict().items()
            if name in ("base_lrs", "last_epoch", "_step_count", "_last_lr")
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint's schedule."""
        self._schedule.load_state_dict({**self._schedule.state_dict(), **state})


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


def _schedule(optim: Any, scheduled: torch.optim.Optimizer) -> Any:
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
