"""verl's optimizer section: AdamW's fields, and the schedule that stock verl's engine builds."""

from __future__ import annotations

import inspect
import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config.optimizer import FSDPOptimizerConfig, build_optimizer
from verl_rows import VOCABULARY, Mock, random_rows, replaced

from backends.mock import create
from remote_rl import AdamW, connect, errors
from shims.verl.optimizer import Optimizer, constants
from shims.verl.updates import update

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


SCHEDULES = ("constant", "cosine")
WARMUPS = ("lr_warmup_steps=-1", "lr_warmup_steps=0", "lr_warmup_steps=4", "lr_warmup_steps=14")
RATIOS = ("lr_warmup_steps_ratio=0", "lr_warmup_steps_ratio=0.35")
FLOORS = ("min_lr_ratio=null", "min_lr_ratio=0.0", "min_lr_ratio=0.1")
SHAPES = (
    ("num_cycles=0.5", "zero_indexed_step=true"),
    ("num_cycles=1.5", "zero_indexed_step=false"),
)


def rates_of(section: Any, steps: int) -> list[float]:
    """Learning rates by the shim, before each of `steps` updates."""
    optimizer = Optimizer(section)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.adamw().lr)
        optimizer.advance()
    return rates


@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_schedule_is_stock_verls(optim: Callable[..., Any], kind: str) -> None:
    base = optim()
    for warmup, ratio, floor, shape in itertools.product(WARMUPS, RATIOS, FLOORS, SHAPES):
        section = replaced(base, f"lr_scheduler_type={kind}", warmup, ratio, floor, *shape)
        where = (warmup, ratio, floor, *shape)
        assert rates_of(section, 14) == stock_rates(section, 14), where  # beyond the last step too


@pytest.mark.filterwarnings("ignore:`warmup_style` is deprecated")
def test_the_deprecated_name_of_the_schedule_is_verls(optim: Callable[..., Any]) -> None:
    section = optim("warmup_style=cosine", "lr_warmup_steps=2")
    assert rates_of(section, 10) == stock_rates(section, 10)
    assert len(set(rates_of(section, 10))) > 3


def test_verl_has_no_schedule_that_this_file_forgets() -> None:
    source = inspect.getsource(FSDPOptimizerConfig.__post_init__)
    [names] = re.findall(r"self.lr_scheduler_type in (\[.*\])", source)
    assert tuple(json.loads(names)) == SCHEDULES


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("betas=[0.8,0.95]", "weight_decay=0.1", "lr=0.003"),
        ("override_optimizer_config={eps: 1e-5, weight_decay: 0.2}",),
    ],
)
def test_adamw_has_what_verls_own_builder_gives_it(
    optim: Callable[..., Any], overrides: tuple[str, ...]
) -> None:
    section = optim(*overrides)
    [group] = build_optimizer([torch.nn.Parameter(torch.zeros(1))], section).param_groups
    adamw = Optimizer(section).adamw()
    for name in ("lr", "betas", "eps", "weight_decay"):
        wanted = group[name]
        assert getattr(adamw, name) == (tuple(wanted) if name == "betas" else wanted), name


def test_steps_are_those_of_verls_optimizer_clip_and_schedule(
    config: Callable[..., Any],
) -> None:
    """Three updates of two mini-batches: the same gradients through torch's AdamW as verl builds
    it, clipped and scheduled as verl's engine does, give the same weights."""
    whole = config(
        "actor_rollout_ref.actor.use_kl_loss=false",
        *[f"{OPTIM}.{each}" for each in ("total_training_steps=4", "weight_decay=0.1", "lr=0.02")],
        *[f"{OPTIM}.{each}" for each in ("clip_grad=0.05", "lr_scheduler_type=cosine")],
    )
    actor = omega_conf_to_dataclass(whole.actor_rollout_ref.actor)
    backend = create(vocab_size=VOCABULARY, initial_scale=1.0)
    with connect(backend) as session:
        mock, optimizer = Mock(session, backend), Optimizer(actor.optim)
        held = {name: torch.nn.Parameter(torch.tensor(each)) for name, each in mock.policy.items()}
        theirs = build_optimizer(list(held.values()), actor.optim)
        rates = stock_rates(actor.optim, 3)
        for number, rate in enumerate(rates):
            rows = random_rows(
                mock.policy, random_seed=number, mini_batch_size=3, global_batch_size=3
            )
            norms = update(mock, actor, optimizer, rows)["grad_norm"]  # type: ignore[arg-type]
            theirs.param_groups[0]["lr"] = rate
            for norm, gradient in zip(norms, mock.gradients[-2:], strict=True):
                for name, each in gradient.items():
                    held[name].grad = torch.tensor(each)
                clip = torch.nn.utils.clip_grad_norm_(list(held.values()), actor.optim.clip_grad)
                assert norm == pytest.approx(clip.item())
                assert norm > actor.optim.clip_grad
                theirs.step()
        for name, each in mock.policy.items():
            np.testing.assert_allclose(each, held[name].detach().numpy(), rtol=1e-6, atol=1e-7)


def test_the_schedule_goes_on_from_a_checkpoints_metadata(optim: Callable[..., Any]) -> None:
    section = optim("lr_scheduler_type=cosine")
    first, second = Optimizer(section), Optimizer(section)
    for _ in range(3):
        first.advance()
    second.restore(json.loads(json.dumps(first.state())))
    for _ in range(3):
        assert second.adamw() == first.adamw()
        assert second.advance() == first.advance()
