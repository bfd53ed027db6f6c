"""Both layouts of verl's rows, padded and jagged: the same batch, and the same bits trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import verl_with_seam  # noqa: F401  makes verl.remote_backend importable, for what follows
from hypothesis import given, settings
from hypothesis import strategies as st
from verl.remote_backend.layouts import Columns, Jagged, Padded, Rollout, columns
from verl.utils.config import omega_conf_to_dataclass
from verl_workload import VOCABULARY

from remote_rl import Batch, connect, errors
from shims.verl.batches import to_batch
from shims.verl.optimizer import Optimizer
from shims.verl.updates import forward, update

PROMPT_WIDTH, RESPONSE_WIDTH = 5, 6
FIELDS = ("advantages", "old_log_probs", "ref_log_prob", "rollout_is_weights")
CALL = {
    "temperature": 0.9,
    "calculate_entropy": True,
    "mini_batch_size": 4,
    "global_batch_size": 4,
    "epochs": 2,
    "seed": 3,
    "dataloader_kwargs": {"shuffle": True},
}

lengths = st.tuples(st.integers(1, PROMPT_WIDTH), st.integers(1, RESPONSE_WIDTH))


def dense_rows(shapes: list[tuple[int, int]], seed: int = 0) -> Columns:
    """Columns with all that an update needs; padded places hold what must not count."""
    random = np.random.default_rng(seed)
    rollouts = [
        Rollout(
            prompt=random.integers(2, len(VOCABULARY), prompt).tolist(),
            response=random.integers(2, len(VOCABULARY), response).tolist(),
            logprobs=random.normal(-2, 0.1, response).tolist(),
            group="one",
            score=1.0,
        )
        for prompt, response in shapes
    ]
    dense = columns(rollouts, PROMPT_WIDTH, RESPONSE_WIDTH)
    for name in FIELDS:
        dense[name] = torch.from_numpy(random.normal(-1, 0.3, dense["responses"].shape)).float()
    dense["response_mask"][::2, 0] = 0  # a token of a tool: real, and not counted
    return dense


SHAPES = [(2, 3), (1, 1), (5, 6), (2, 3), (3, 2), (1, 6), (4, 4), (2, 5)]


@settings(deadline=None)
@given(st.lists(lengths, min_size=1, max_size=8), st.integers(0, 9))
def test_both_layouts_are_the_same_batch(shapes: list[tuple[int, int]], seed: int) -> None:
    dense = dense_rows(shapes, seed)
    padded, jagged = (
        to_batch(layout.send(dense, CALL), training=True) for layout in (Padded(), Jagged())
    )
    for name in ("prompts", "prompt_index", "responses", "mask", "temperature", "advantages"):
        assert bits(padded, name) == bits(jagged, name), name
    for name in ("old_logprobs", "ref_logprobs", "importance_weights"):
        assert bits(padded, name) == bits(jagged, name), name
    assert [len(row) for row in padded.responses] == [response for _, response in shapes]


def bits(batch: Batch, name: str) -> tuple[bytes, ...]:
    field = getattr(batch, name)
    parts = (field,) if isinstance(field, np.ndarray) else (field.values, field.offsets)
    return tuple(part.dtype.str.encode() + part.tobytes() for part in parts)


@pytest.mark.parametrize("mode", ["vanilla", "sapo"])  # by name; verl's own function
def test_both_layouts_train_the_same_bits(config: Callable[..., Any], mode: str) -> None:
    section = config(
        "actor_rollout_ref.actor.optim.total_training_steps=5",
        f"actor_rollout_ref.actor.policy_loss.loss_mode={mode}",
    ).actor_rollout_ref.actor
    dense, found = dense_rows(SHAPES), []
    for layout in (Padded(), Jagged()):
        with connect("mock", vocab_size=len(VOCABULARY)) as session:
            actor = omega_conf_to_dataclass(section)
            metrics = update(session, actor, Optimizer(actor.optim), layout.send(dense, CALL))
            sent = layout.send(dense, CALL)
            result = forward(session, sent, {"logprobs", "entropy"}, "current")
            outputs = [layout.receive(result[name], sent) for name in ("log_probs", "entropy")]
            assert all(norm > 0 for norm in metrics["grad_norm"])
            steps = [metrics[name] for name in ("loss", "grad_norm", "kl_loss", "actor/pg_loss")]
            found.append((steps, [each.numpy().tobytes() for each in outputs]))
    assert found[0] == found[1]


def test_a_mask_that_does_not_fit_is_refused() -> None:
    sent = Padded().send(dense_rows(SHAPES), CALL)
    sent["attention_mask"] = sent["attention_mask"][:, :-1]
    with pytest.raises(errors.InvalidRequestError, match=r"responses of shape \(8, 6\)"):
        to_batch(sent)
