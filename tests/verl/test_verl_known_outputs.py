"""What a loss that runs in the worker brings along: outputs that are held already are not computed
again, and what else costs a forward is shown; a step without a finite gradient is skipped as verl's
engine skips it; a checkpoint holds the random state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils import tensordict_utils
from verl_rows import Run, jagged, random_rows, running

from shims.verl.batches import to_batch

ACTOR = "actor_rollout_ref.actor"
TWO = {"mini_batch_size": 3, "global_batch_size": 3}


@pytest.fixture
def start(config: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """A run by verl's `loss_mode` and further overrides of the actor."""
    with ExitStack() as opened:

        def build(mode: str, *more: str) -> Run:
            settings = (f"policy_loss.loss_mode={mode}", *more)
            overrides = [f"{ACTOR}.{each}" for each in settings]
            folder = tmp_path / f"server-{len(list(tmp_path.iterdir()))}"
            folder.mkdir()
            return opened.enter_context(running(config, *overrides, checkpoint_dir=folder))

        yield build


def tokens(rows: TensorDict) -> int:
    """Prompt tokens, each prompt once, and response tokens."""
    batch = to_batch(rows)
    return len(batch.prompts.values) + len(batch.responses.values)


def test_a_named_loss_needs_no_forward(start: Callable[..., Run]) -> None:
    run = start("vanilla")
    rows = random_rows(run.policy, **TWO, epochs=2)
    run.worker.compute_log_prob(rows)
    run.worker.compute_ref_log_prob(rows)
    metrics = run.update(rows)
    assert len(run.requests("forward")) == 2
    assert metrics["extra_forward_tokens"] == [0.0]


def test_on_policy_the_outputs_of_compute_log_prob_are_used_again(
    start: Callable[..., Run],
) -> None:
    run, other = start("sapo"), start("sapo")
    rows = random_rows(run.policy)
    run.worker.compute_log_prob(rows)
    run.worker.update_weights(global_steps=1)  # sampler's weights: the trainer's stay as they are
    metrics = run.update(rows)
    assert len(run.requests("forward")) == 1
    assert metrics["extra_forward_tokens"] == [0.0]
    paid = other.update(rows)
    assert len(other.requests("forward")) == 1
    assert paid["extra_forward_tokens"] == [float(tokens(rows))]
    for name, array in run.policy.items():
        assert np.array_equal(array, other.policy[name]), name


def test_every_mini_batch_but_the_first_costs_a_forward(start: Callable[..., Run]) -> None:
    run = start("dro", "policy_loss.dro_beta=0.1")
    call = {"epochs": 2, "seed": 7, "dataloader_kwargs": {"shuffle": True}}
    rows = random_rows(run.policy, **TWO, **call)
    run.worker.compute_log_prob(rows)
    metrics = run.update(rows)
    assert len(run.requests("forward")) == 1 + 3
    pieces = list(tensordict_utils.make_iterator(rows, mini_batch_size=3, **call))
    assert metrics["extra_forward_tokens"] == [float(sum(map(tokens, pieces[1:])))]


def test_rows_in_another_order_are_found(start: Callable[..., Run]) -> None:
    run = start("geo_mean")
    rows = random_rows(run.policy)
    run.worker.compute_log_prob(rows)
    turned = tensordict_utils.index_select_tensor_dict(rows, [5, 3, 1, 0, 2, 4])
    assert run.update(turned)["extra_forward_tokens"] == [0.0]
    assert len(run.requests("forward")) == 1


def _other_temperature(run: Run, rows: TensorDict) -> TensorDict:
    tensordict_utils.assign_non_tensor(rows, temperature=0.9)
    return rows


def _another_token(run: Run, rows: TensorDict) -> TensorDict:
    responses = [row.clone() for row in rows["responses"].unbind()]
    responses[2][-1] = 3 if responses[2][-1] != 3 else 4
    rows["responses"] = jagged(responses)
    return rows


def _other_weights(run: Run, rows: TensorDict) -> TensorDict:
    run.session.training.snapshot("same").result()
    run.session.training.restore_snapshot("same").result()
    return rows


def _a_reference_in_between(run: Run, rows: TensorDict) -> TensorDict:
    run.worker.compute_ref_log_prob(rows)
    return rows


@pytest.mark.parametrize(
    ("change", "extra"),
    [
        (_other_temperature, 1),
        (_another_token, 1),
        (_other_weights, 1),
        (_a_reference_in_between, 0),
    ],
)
def test_only_the_same_rows_of_the_same_weights_are_used_again(
    start: Callable[..., Run], change: Callable[..., TensorDict], extra: int
) -> None:
    run = start("sapo")
    rows = random_rows(run.policy)
    run.worker.compute_log_prob(rows)
    changed = change(run, rows.copy())
    before = len(run.requests("forward"))
    metrics = run.update(changed)
    assert len(run.requests("forward")) - before == extra
    assert (metrics["extra_forward_tokens"] == [0.0]) == (extra == 0)


def test_an_output_that_was_not_computed_is_paid_for(start: Callable[..., Run]) -> None:
    run = start("sapo")
    rows = random_rows(run.policy, calculate_entropy=False)
    run.worker.compute_log_prob(rows)
    tensordict_utils.assign_non_tensor(rows, calculate_entropy=True)
    run.update(rows)
    assert len(run.requests("forward")) == 2


# -- steps that are skipped -----------------------------------------------------------------------


@pytest.fixture
def blows_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy loss whose gradient is NaN in its first mini-batch, the others verl's gpg."""
    calls: list[int] = []

    def loss(**given: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        calls.append(1)
        value, metrics = POLICY_LOSS_REGISTRY["gpg"](**given)
        return (value * torch.nan if len(calls) == 1 else value), metrics

    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "blows_up", loss)


@pytest.mark.usefixtures("blows_up")
def test_a_loss_of_verls_own_without_a_finite_gradient_skips_the_step(
    start: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    run, plain = (
        start(mode, "use_kl_loss=false", "optim.lr_warmup_steps=2") for mode in ("blows_up", "gpg")
    )
    rows = random_rows(run.policy, **TWO)
    run.worker.compute_log_prob(rows)
    with caplog.at_level(logging.WARNING, "remote_rl.shims.verl"):
        for worker in (run, plain):
            worker.worker._optimizer.advance()  # past the warm-up's rate of 0
        metrics = run.update(rows)
    assert [np.isfinite(norm) for norm in metrics["grad_norm"]] == [False, True]
    assert np.isnan(metrics["loss"][0])
    assert metrics["extra_forward_tokens"] == [0.0]  # the weights are still those of the outputs
    assert "mini-batch 0 was skipped" in caplog.text
    second = tensordict_utils.index_select_tensor_dict(rows, [3, 4, 5])
    assert plain.update(second)["lr"] == metrics["lr"]  # the schedule moves all the same
    for name, array in run.policy.items():
        np.testing.assert_allclose(array, plain.policy[name], rtol=0, atol=1e-6)


def test_a_named_loss_without_a_finite_gradient_skips_the_step(start: Callable[..., Run]) -> None:
    run = start("gpg", "use_kl_loss=true", "kl_loss_coef=1e300", "kl_loss_type=k2")
    before = run.policy
    rows = random_rows(run.policy, calculate_entropy=False)
    rate = run.worker._optimizer.lr
    metrics = run.update(rows)
    assert not np.isfinite(metrics["grad_norm"][0])
    assert metrics["lr"] == [rate]
    assert all(np.array_equal(array, before[name]) for name, array in run.policy.items())


def test_stock_verl_skips_such_a_step_too() -> None:
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    engine: Any = object.__new__(FSDPEngine)
    engine.module = torch.nn.Linear(2, 1)
    engine.optimizer = torch.optim.AdamW(engine.module.parameters(), lr=0.1)
    engine.optimizer_config = SimpleNamespace(clip_grad=1.0)
    engine._qat_enabled = False
    before = engine.module.weight.detach().clone()
    engine.module.weight.grad = torch.full_like(before, torch.nan)
    assert np.isnan(FSDPEngine.optimizer_step(engine))
    assert torch.equal(engine.module.weight, before)
    assert not engine.optimizer.state


# -- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "held"), [("clip_cov", True), ("vanilla", False)])
def test_a_checkpoint_holds_the_random_state_of_a_loss_that_draws(
    start: Callable[..., Run], tmp_path: Path, mode: str, held: bool
) -> None:
    run, folder = start(mode), str(tmp_path / "global_step_1" / "actor")
    torch.manual_seed(8)
    torch.rand(3)
    run.worker.save_checkpoint(folder, global_step=1)
    drawn = torch.rand(3)
    run.worker.load_checkpoint(folder)
    assert torch.equal(torch.rand(3), drawn) == held
