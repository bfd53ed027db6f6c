"""What SkyRL's trainer calls its workers through: steps, schedule, checkpoints, syncs, refusals."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
from skyrl.train.config import SkyRLTrainConfig
from skyrl_rows import VOCABULARY, Mock, algorithm, random_rows, stock_step
from transformers import get_scheduler

from backends.mock import create
from remote_rl import Session, connect, errors
from shims.common.checkpoints import MANIFEST
from shims.skyrl.batches import to_batch
from shims.skyrl.dispatch import RemoteDispatch
from shims.skyrl.options import Options

STEPS = 6


@pytest.fixture
def mock(tmp_path: Path) -> Iterator[Mock]:
    backend = create(vocab_size=VOCABULARY, initial_scale=1.0)
    with connect(backend, checkpoint_dir=tmp_path / "server") as session:
        yield Mock(session, backend)


def config(**optimizer: Any) -> SkyRLTrainConfig:
    made = SkyRLTrainConfig()
    made.trainer.algorithm = algorithm()
    for name, value in {"lr": 0.01, **optimizer}.items():
        setattr(made.trainer.policy.optimizer_config, name, value)
    return made


def dispatch(held: Mock, given: SkyRLTrainConfig | None = None, *, step: int = 3) -> RemoteDispatch:
    return RemoteDispatch(
        config() if given is None else given,
        held.session,
        Options(target="mock"),
        steps=STEPS,
        global_step=lambda: step,
    )


def rows_of(held: Mock, seed: int = 0) -> TrainingInputBatch:
    return random_rows(held.policy, random_seed=seed)


def train(made: RemoteDispatch, rows: TrainingInputBatch) -> float | None:
    made.forward_backward("policy", rows)
    return made.optim_step("policy")


def checkpoint_names(session: Session) -> list[str]:
    return [each.name for each in session.training.checkpoints().result()]


# -- steps --------------------------------------------------------------------------------------


def test_a_forward_is_at_the_policys_temperature_and_the_references_at_one(mock: Mock) -> None:
    rows, made = rows_of(mock), dispatch(mock)
    width = rows["response_mask"].shape[1]
    for model, temperature in (("policy", 0.7), ("ref", 1.0)):
        found = made.forward(model, rows).loss_fn_outputs
        batch = to_batch(rows, temperature=temperature)
        wanted = mock.session.training.forward(batch).result()["logprobs"]
        assert [len(each["logprobs"]) for each in found] == [width] * len(rows)
        for row, each in zip(found, wanted, strict=True):
            flat = row["logprobs"]
            assert flat[width - len(each) :] == pytest.approx(each.tolist())
            assert flat[: width - len(each)] == [0.0] * (width - len(each))


def test_every_mini_batch_is_a_step_of_torchs_adamw_on_skyrls_gradient(mock: Mock) -> None:
    given = config(weight_decay=0.1, adam_betas=[0.8, 0.95], max_grad_norm=0.05, scheduler="linear")
    given.trainer.policy.optimizer_config.num_warmup_steps = 2
    made = dispatch(mock, given)
    leaves = {name: torch.tensor(each, requires_grad=True) for name, each in mock.policy.items()}
    optimizer = torch.optim.AdamW(leaves.values(), lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=STEPS)
    for seed in range(4):
        rows = rows_of(mock, seed)
        (chunk,) = made.stage_data("policy", rows, [(0, len(rows))])
        _, gradient = stock_step(given.trainer.algorithm, mock.policy, rows)
        for name, leaf in leaves.items():
            leaf.grad = torch.tensor(gradient[name], dtype=leaf.dtype)
        norm = torch.nn.utils.clip_grad_norm_(leaves.values(), 0.05)
        status = made.forward_backward_from_staged("policy", chunk).metrics
        assert status["policy_lr"] == pytest.approx(schedule.get_last_lr()[0])
        assert made.optim_step("policy") == pytest.approx(float(norm), rel=1e-4)
        optimizer.step()
        schedule.step()
        for name, leaf in leaves.items():
            np.testing.assert_allclose(mock.policy[name], leaf.detach().numpy(), atol=2e-6)
    assert mock.session.weights.version().result().trainer == 4


def test_mini_batches_are_cut_where_skyrl_says(mock: Mock) -> None:
    rows = rows_of(mock)
    staged = dispatch(mock).stage_data("policy", rows, [(0, 2), (2, len(rows))])
    assert [len(chunk) for chunk in staged] == [1, 1]
    assert [len(chunk[0]) for chunk in staged] == [2, len(rows) - 2]
    assert torch.equal(staged[1][0]["sequences"], rows["sequences"][2:])


def _not_a_number(
    log_probs: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, dict[str, float]]:
    return (log_probs * math.nan).sum(), {}


@pytest.fixture
def register() -> Iterator[Callable[[str, Any], None]]:
    added: list[str] = []

    def one(name: str, function: Any) -> None:
        PolicyLossRegistry.register(name, function)
        added.append(name)

    yield one
    for name in added:
        PolicyLossRegistry.unregister(name)


def test_a_gradient_that_is_not_finite_is_skipped_and_the_schedule_waits(
    mock: Mock, register: Callable[[str, Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    register("not_a_number", _not_a_number)
    given = config(scheduler="linear")
    made = dispatch(mock, given)
    before, rows = mock.policy, rows_of(mock)
    given.trainer.algorithm.policy_loss_type = "not_a_number"
    with caplog.at_level(logging.WARNING, "remote_rl.shims.skyrl"):
        norm = train(made, rows)
    assert norm is not None
    assert math.isnan(norm)
    assert "a mini-batch was skipped: its gradient's norm is nan" in caplog.text
    for name, each in before.items():
        np.testing.assert_array_equal(mock.policy[name], each)
    given.trainer.algorithm.policy_loss_type = "regular"
    status = made.forward_backward("policy", rows).metrics
    assert status["policy_lr"] == 0.01
    assert made.optim_step("policy") is not None
    assert mock.session.weights.version().result().trainer == 1


# -- the reference, weights ---------------------------------------------------------------------


def test_the_reference_becomes_the_policy(mock: Mock) -> None:
    rows, made = rows_of(mock), dispatch(mock)
    train(made, rows)

    def logprobs(model: str) -> list[list[float]]:
        return [each["logprobs"] for each in made.forward(model, rows).loss_fn_outputs]

    given = config()
    given.trainer.algorithm = algorithm(temperature=1.0)
    made = dispatch(mock, given)
    assert logprobs("ref") != logprobs("policy")
    made.init_model("ref", "anywhere")
    assert logprobs("ref") == logprobs("policy")


class Client:
    def __init__(self) -> None:
        self.versions = 0

    def increment_weight_version(self) -> None:
        self.versions += 1


def test_a_sync_carries_the_step_and_raises_the_clients_version(mock: Mock) -> None:
    made, client = dispatch(mock, step=7), Client()
    made.init_weight_sync_state(client)
    assert made.get_timing_metrics() == {}
    train(made, rows_of(mock))
    asyncio.run(made.save_weights_for_sampler())
    versions = mock.session.weights.version().result()
    assert (versions.sampler, versions.label, client.versions) == (1, 7, 1)
    assert made.get_timing_metrics()["sync_weights_only_transfer"] >= 0


# -- checkpoints --------------------------------------------------------------------------------


def test_a_checkpoint_brings_weights_optimizer_schedule_and_random_numbers_back(
    mock: Mock, tmp_path: Path
) -> None:
    folder = tmp_path / "global_step_3" / "policy"
    given = config(scheduler="linear")
    made = dispatch(mock, given)
    rows = rows_of(mock)
    train(made, rows)
    made.save_checkpoint("policy", str(folder))
    made.finalize_pending_saves("policy")
    drawn = torch.rand(3)
    wanted = [train(made, rows_of(mock, seed)) for seed in (1, 2)]
    weights = mock.policy

    again = dispatch(mock, given)
    again.load_checkpoint("policy", str(folder))
    assert torch.equal(torch.rand(3), drawn)
    assert [train(again, rows_of(mock, seed)) for seed in (1, 2)] == wanted
    for name, each in weights.items():
        np.testing.assert_array_equal(mock.policy[name], each)
    status = again.forward_backward("policy", rows).metrics
    assert status["policy_lr"] == pytest.approx(0.01 * (STEPS - 3) / STEPS)


def test_a_schedule_that_is_not_asked_for_begins_anew(mock: Mock, tmp_path: Path) -> None:
    folder = str(tmp_path / "policy")
    made = dispatch(mock, config(scheduler="linear"))
    train(made, rows_of(mock))
    made.save_checkpoint("policy", folder)
    again = dispatch(mock, config(scheduler="linear"))
    again.load_checkpoint("policy", folder, True, False)
    assert again.forward_backward("policy", rows_of(mock)).metrics["policy_lr"] == 0.01


def test_a_folder_that_another_engine_saved_is_named(mock: Mock, tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidRequestError, match=r"trainer\.resume_mode=none"):
        dispatch(mock).load_checkpoint("policy", str(tmp_path))


def test_old_checkpoints_go_by_skyrls_rule_on_both_sides(mock: Mock, tmp_path: Path) -> None:
    base = tmp_path / "ckpts"
    for step in range(1, 5):
        made = dispatch(mock, step=step)
        made.save_checkpoint("policy", str(base / f"global_step_{step}" / "policy"))
        made.clean(str(base), 2)
    assert sorted(each.name for each in base.iterdir()) == ["global_step_3", "global_step_4"]
    named = [json.loads(each.read_text()) for each in base.glob(f"*/policy/{MANIFEST}")]
    assert sorted(each["checkpoint"] for each in named) == sorted(checkpoint_names(mock.session))
    dispatch(mock).clean(str(base), -1)
    assert len(list(base.iterdir())) == 2


class Tokenizer:
    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "tokenizer.json").write_text("{}")


def test_an_export_replaces_the_one_before_and_stays_nowhere_else(
    mock: Mock, tmp_path: Path
) -> None:
    folder = tmp_path / "exports" / "policy"
    made = dispatch(mock)
    made.save_hf_model("policy", str(folder), Tokenizer())
    first = (folder / "model.safetensors").read_bytes()
    train(made, rows_of(mock))
    made.save_hf_model("policy", str(folder), Tokenizer())
    assert (folder / "model.safetensors").read_bytes() != first
    assert [each.name for each in folder.parent.iterdir()] == ["policy"]
    assert (folder / "tokenizer.json").exists()
    assert list((tmp_path / "server" / "exports").iterdir()) == []


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda made, rows: made.forward("critic", rows), "trainer.critic.model.path"),
        (lambda made, rows: made.forward_backward("ref", rows), "'ref' is not trained"),
        (lambda made, rows: made.forward("policy", rows, "ppo"), "loss_fn='ppo'"),
        (lambda made, rows: made.optim_step("policy", "adapter"), "model_id='adapter'"),
        (
            lambda made, rows: made.forward("policy", rows, return_per_token_outputs=False),
            "return_per_token_outputs=False",
        ),
        (lambda made, rows: made.start_profile("policy"), "torch_profiler_config.enable"),
        (lambda made, rows: made.set_lr("policy", 0.1), "optimizer_config"),
        (lambda made, rows: made.set_algorithm_config("policy", eps_clip_low=1), "eps_clip_low"),
        (lambda made, rows: made.init_model("policy", "anywhere"), "load a checkpoint"),
    ],
)
def test_what_no_run_can_do_is_refused_by_name(
    mock: Mock, call: Callable[[RemoteDispatch, TrainingInputBatch], Any], message: str
) -> None:
    with pytest.raises(errors.UnsupportedError) as caught:
        call(dispatch(mock), rows_of(mock))
    assert message in str(caught.value)
    assert mock.session.weights.version().result().trainer == 0
