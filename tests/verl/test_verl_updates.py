"""What the worker does with verl's rows: forwards, and the mini-batches of an update, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.padding import response_from_nested

from remote_rl import AdamW, Batch, Session, connect
from shims.verl.optimizer import Optimizer
from shims.verl.updates import forward, update

ROWS, VOCABULARY = 8, 28


class Recorder:
    """A session that keeps what goes through its training face."""

    def __init__(self, session: Session) -> None:
        self.training = self
        self.batches: list[Batch] = []
        self.losses: list[Any] = []
        self.optimizers: list[AdamW] = []
        self._real = session.training

    def forward_backward(self, batch: Batch, loss: Any) -> Any:
        self.batches.append(batch)
        self.losses.append(loss)
        return self._real.forward_backward(batch, loss)

    def optim_step(self, optimizer: AdamW) -> Any:
        self.optimizers.append(optimizer)
        return self._real.optim_step(optimizer)


@pytest.fixture
def session() -> Iterator[Session]:
    with connect("mock", vocab_size=VOCABULARY) as held:
        yield held


@pytest.fixture
def actor(config: Callable[..., Any]) -> Any:
    """verl's actor configuration as the worker has it."""
    section = config("actor_rollout_ref.actor.optim.total_training_steps=5")
    return omega_conf_to_dataclass(section.actor_rollout_ref.actor)


def jagged(rows: list[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


def update_rows(**meta: Any) -> TensorDict:
    """What verl sends with update_actor: row i's first response token is 10 + i."""
    random = np.random.default_rng(0)
    lengths = [1 + index % 3 for index in range(ROWS)]
    responses = [[10 + row] + [5] * (length - 1) for row, length in enumerate(lengths)]
    floats = {
        name: jagged([random.normal(-2, 0.1, length) for length in lengths], torch.float32)
        for name in ("old_log_probs", "ref_log_prob", "advantages")
    }
    masks = [[1] * length for length in lengths]
    tensors = {
        "prompts": jagged([[2, 3 + row // 4] for row in range(ROWS)]),
        "responses": jagged(responses),
        "response_mask": jagged(masks),
        "loss_mask": jagged(masks),
        **floats,
    }
    call = {
        "temperature": 0.9,
        "calculate_entropy": True,
        "mini_batch_size": 4,
        "global_batch_size": 4,
        "epochs": 1,
        "seed": 42,
        "dataloader_kwargs": {"shuffle": False},
    }
    return tensordict_utils.get_tensordict(tensors, {**call, **meta})


def first_tokens(batches: list[Batch]) -> list[list[int]]:
    return [[int(row[0]) - 10 for row in batch.responses] for batch in batches]


def test_forward_returns_verls_layout(session: Session) -> None:
    data = update_rows()
    result = forward(session, data, {"logprobs", "entropy"}, "current")
    responses = [row.tolist() for row in data["responses"].unbind()]
    for name in ("log_probs", "entropy"):
        rows = response_from_nested(result[name], data["response_mask"]).unbind()
        assert [len(row) for row in rows] == [len(row) for row in responses]
    assert result.batch_size[0] == ROWS
    assert all((row <= 0).all() for row in result["log_probs"].unbind())
    assert all((row >= 0).all() for row in result["entropy"].unbind())


def test_the_reference_stays_while_the_policy_moves(session: Session, actor: Any) -> None:
    before = forward(session, update_rows(), {"logprobs"}, "reference")["log_probs"].values()
    update(session, actor, Optimizer(actor.optim), update_rows())
    after = forward(session, update_rows(), {"logprobs"}, "reference")["log_probs"].values()
    current = forward(session, update_rows(), {"logprobs"}, "current")["log_probs"].values()
    assert torch.equal(before, after)
    assert not torch.equal(before, current)


def test_one_optimizer_step_a_mini_batch(session: Session, actor: Any) -> None:
    recorder, version = Recorder(session), session.weights.version().result().trainer
    metrics = update(recorder, actor, Optimizer(actor.optim), update_rows(epochs=2))  # type: ignore[arg-type]
    in_order = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert first_tokens(recorder.batches) == in_order * 2
    assert session.weights.version().result().trainer == version + 4
    assert len(metrics["loss"]) == len(metrics["grad_norm"]) == 4


def test_shuffled_mini_batches_are_those_of_stock_verl(session: Session, actor: Any) -> None:
    call = {"seed": 7, "epochs": 2, "dataloader_kwargs": {"shuffle": True}}
    stock = [
        [int(row[0]) - 10 for row in rows["responses"].unbind()]
        for rows in tensordict_utils.make_iterator(update_rows(), mini_batch_size=4, **call)
    ]
    recorder = Recorder(session)
    update(recorder, actor, Optimizer(actor.optim), update_rows(**call))  # type: ignore[arg-type]
    assert first_tokens(recorder.batches) == stock
    assert stock[0] != [0, 1, 2, 3]


def test_the_mini_batch_size_is_the_calls_not_the_configurations(
    session: Session, actor: Any
) -> None:
    recorder = Recorder(session)
    data = update_rows(mini_batch_size=2, global_batch_size=2)
    update(recorder, actor, Optimizer(actor.optim), data)  # type: ignore[arg-type]
    assert [len(batch) for batch in recorder.batches] == [2, 2, 2, 2]


def test_denominators_are_the_whole_mini_batchs(session: Session, actor: Any) -> None:
    recorder = Recorder(session)
    update(recorder, actor, Optimizer(actor.optim), update_rows())  # type: ignore[arg-type]
    counted = [int(batch.mask.values.sum()) for batch in recorder.batches]
    assert [loss.aggregation.denominator for loss in recorder.losses] == counted


def test_prompts_of_a_group_are_sent_once(session: Session, actor: Any) -> None:
    recorder = Recorder(session)
    update(recorder, actor, Optimizer(actor.optim), update_rows())  # type: ignore[arg-type]
    assert [len(batch.prompts) for batch in recorder.batches] == [1, 1]


def test_the_learning_rate_moves_once_an_update(session: Session, config: Any) -> None:
    section = config(
        "actor_rollout_ref.actor.optim.total_training_steps=5",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=2",
    )
    actor = omega_conf_to_dataclass(section.actor_rollout_ref.actor)
    recorder, optimizer = Recorder(session), Optimizer(actor.optim)
    reported = [
        update(recorder, actor, optimizer, update_rows())["lr"]  # type: ignore[arg-type]
        for _ in range(2)
    ]
    assert [each.lr for each in recorder.optimizers] == [0.0, 0.0, 0.005, 0.005]
    assert reported == [[0.005], [0.01]]


def test_metrics_have_verls_names(session: Session, actor: Any) -> None:
    metrics = update(session, actor, Optimizer(actor.optim), update_rows())
    stock = {
        "actor/pg_loss",
        "actor/pg_clipfrac",
        "actor/pg_clipfrac_lower",
        "actor/ppo_kl",
        "actor/entropy_loss",
        "kl_loss",
        "kl_coef",
        "loss",
        "grad_norm",
        "lr",
        "mfu",
    }
    assert stock <= set(metrics)
    assert metrics["mfu"] == [0.0]
    assert all(norm > 0 for norm in metrics["grad_norm"])


def test_padding_rows_change_nothing(session: Session, actor: Any) -> None:
    data = update_rows(mini_batch_size=ROWS, global_batch_size=ROWS)
    masked = [
        [0] * len(row) if index >= 4 else [1] * len(row)
        for index, row in enumerate(data["responses"].unbind())
    ]
    data["response_mask"], data["loss_mask"] = jagged(masked), jagged(masked)
    half = update_rows(mini_batch_size=4, global_batch_size=4)
    half = tensordict_utils.index_select_tensor_dict(half, [0, 1, 2, 3])
    session.training.snapshot("before").result()
    padded = update(session, actor, Optimizer(actor.optim), data)
    session.training.restore_snapshot("before").result()
    plain = update(session, actor, Optimizer(actor.optim), half)
    assert padded["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    assert padded["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-6)


@pytest.mark.parametrize("mode", ["sapo", "clip_cov", "dro"])
def test_losses_without_a_name_are_verls_own_functions(
    session: Session, config: Any, mode: str
) -> None:
    section = config(
        "actor_rollout_ref.actor.optim.total_training_steps=5",
        f"actor_rollout_ref.actor.policy_loss.loss_mode={mode}",
        "actor_rollout_ref.actor.policy_loss.dro_beta=0.1",
    )
    actor = omega_conf_to_dataclass(section.actor_rollout_ref.actor)
    version = session.weights.version().result().trainer
    metrics = update(session, actor, Optimizer(actor.optim), update_rows())
    assert session.weights.version().result().trainer == version + 2
    assert metrics["extra_forward_tokens"] == [19.0]  # what such a loss costs is shown
    assert all(norm > 0 for norm in metrics["grad_norm"])
    assert {"actor/pg_loss", "actor/entropy_loss", "kl_loss", "kl_coef"} <= set(metrics)
