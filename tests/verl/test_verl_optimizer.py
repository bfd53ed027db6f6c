"""verl's optimizer section: AdamW's fields, and the schedule that stock verl's engine builds."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from verl.utils.config import omega_conf_to_dataclass

from remote_rl import AdamW, errors
from shims.verl.optimizer import Optimizer, constants

OPTIM = "actor_rollout_ref.actor.optim"


@pytest.fixture
def optim(config: Callable[..., Any]) -> Callable[..., Any]:
    """verl's dataclass of the section, as the worker has it."""
    return lambda *overrides: omega_conf_to_dataclass(
        config(
            f"{OPTIM}.total_training_steps=10", *[f"{OPTIM}.{each}" for each in overrides]
        ).actor_rollout_ref.actor.optim
    )


def stock_rates(section: Any, steps: int) -> list[float]:
    """Learning rates of stock verl's own scheduler, before each of `steps` updates."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([parameter], lr=section.lr)
    engine = object.__new__(FSDPEngine)
    engine.optimizer_config, engine.rank = section, 1
    scheduler = FSDPEngine._build_lr_scheduler(engine, optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_the_fields_of_adamw(optim: Callable[..., Any]) -> None:
    section = optim("betas=[0.8,0.95]", "weight_decay=0.1", "clip_grad=0.5", "lr=0.001")
    assert Optimizer(section).adamw() == AdamW(
        lr=0.001, betas=(0.8, 0.95), eps=1e-8, weight_decay=0.1, max_grad_norm=0.5
    )


def test_overrides_reach_adamw(optim: Callable[..., Any]) -> None:
    section = optim("override_optimizer_config={eps: 1e-6, betas: [0.7, 0.9], fused: true}")
    fields = constants(section)
    assert fields["eps"] == 1e-6
    assert fields["betas"] == (0.7, 0.9)
    assert "fused" not in fields


def test_an_override_without_counterpart_is_refused(optim: Callable[..., Any]) -> None:
    with pytest.raises(errors.UnsupportedError, match=r"override_optimizer_config\.amsgrad=True"):
        constants(optim("override_optimizer_config={amsgrad: true}"))


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("lr_warmup_steps=4",),
        ("lr_warmup_steps_ratio=0.3",),
        ("lr_scheduler_type=cosine", "lr_warmup_steps=2", "min_lr_ratio=0.1"),
        ("lr_scheduler_type=cosine", "num_cycles=1.5", "zero_indexed_step=false"),
    ],
)
def test_the_schedule_is_stock_verls(optim: Callable[..., Any], overrides: tuple[str, ...]) -> None:
    section = optim(*overrides)
    optimizer = Optimizer(section)
    rates = []
    for _ in range(10):
        rates.append(optimizer.adamw().lr)
        optimizer.advance()
    assert rates == stock_rates(section, 10)


def test_the_schedule_goes_on_from_a_checkpoints_metadata(optim: Callable[..., Any]) -> None:
    section = optim("lr_scheduler_type=cosine")
    first, second = Optimizer(section), Optimizer(section)
    for _ in range(3):
        first.advance()
    second.restore(json.loads(json.dumps(first.state())))
    for _ in range(3):
        assert second.adamw() == first.adamw()
        assert second.advance() == first.advance()
