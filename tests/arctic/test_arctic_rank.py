"""Ranks and plain PyTorch compute the same gradients and take the same steps, whatever the number
of ranks, the ZeRO stage, the pieces and the packing."""

from __future__ import annotations

import math

import arctic_ranks
import numpy as np
import pytest
import torch
from arctic_oracle import (
    NAMED_LOSSES,
    largest_relative_difference,
    plain_gradients,
    random_batch,
    random_cotangents,
)
from arctic_ranks import RankFailed
from arctic_training import MEASURE, STEADY, Plain, Trainer, same

from remote_rl.losses import CrossEntropy, Reinforce, resolve
from remote_rl.types import AdamW

BATCH = random_batch(3)
COTANGENTS = random_cotangents(BATCH)


@pytest.fixture
def plain(kind, tiny_models):
    return Plain(tiny_models[kind.architecture])


@pytest.fixture
def trainer(ranks):
    return Trainer(ranks)


# -- gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [*NAMED_LOSSES, "cotangents"])
def test_gradients_are_those_of_plain_pytorch(trainer, plain, loss):
    chosen = NAMED_LOSSES.get(loss, COTANGENTS)
    value, metrics = trainer.forward_backward(BATCH, chosen)
    expected = plain_gradients(plain.model, BATCH, chosen)
    found = trainer.gradients()
    assert largest_relative_difference(found, expected) < 1e-5
    assert math.isfinite(value)
    if loss != "cotangents":
        assert metrics["tokens"] == int(BATCH.mask.values.sum())


@pytest.mark.parametrize("rows", [[0], [6, 3], [0, 2, 3, 4, 5], [1, 3]])
def test_gradients_do_not_depend_on_how_rows_fall_on_ranks(trainer, plain, rows):
    """One row for several ranks, fewer rows than ranks, rows that divide by no number of ranks, and
    none that counts (an empty one and one that is masked out)."""
    batch = BATCH.select(rows)
    loss = NAMED_LOSSES["ppo with kl and entropy"]
    trainer.forward_backward(batch, loss)
    expected = plain_gradients(plain.model, batch, loss)
    found = trainer.gradients()
    if rows == [1, 3]:
        assert all(not each.any() for each in found.values())
    else:
        assert largest_relative_difference(found, expected) < 1e-5


@pytest.mark.parametrize("budget", [1, 25, 10_000])
def test_gradients_do_not_depend_on_pieces(ranks, plain, budget):
    trainer = Trainer(ranks, budget)
    trainer.forward_backward(BATCH, COTANGENTS)
    expected = plain_gradients(plain.model, BATCH, COTANGENTS)
    assert largest_relative_difference(trainer.gradients(), expected) < 1e-5


def test_a_rank_may_have_no_batch_at_all(ranks, plain):
    loss = resolve(CrossEntropy(), BATCH)
    nothing = (None, (np.empty(0, np.int64),), loss)
    everything = (BATCH, (np.arange(len(BATCH)),), loss)
    answers = ranks.call_each("forward_backward", [everything, *[nothing] * (ranks.world - 1)])
    assert [each.value for each in answers[1:]] == [0.0] * (ranks.world - 1)
    expected = plain_gradients(plain.model, BATCH, loss)
    assert largest_relative_difference(Trainer(ranks).gradients(), expected) < 1e-5


def test_outputs_are_those_of_plain_pytorch(trainer, plain):
    found, expected = trainer.forward(BATCH), plain.outputs(BATCH)
    for name, column in expected.items():
        np.testing.assert_allclose(found[name], column, rtol=0, atol=2e-5)


def test_a_forward_in_between_leaves_the_gradient_alone(trainer, plain):
    trainer.forward_backward(BATCH, COTANGENTS)
    trainer.forward(BATCH)
    trainer.ranks.call("snapshot", "here")
    trainer.forward(BATCH, "here")
    trainer.forward_backward(BATCH, CrossEntropy())
    plain.forward_backward(BATCH, COTANGENTS)
    plain.forward_backward(BATCH, CrossEntropy())
    assert largest_relative_difference(trainer.gradients(), plain._total) < 1e-5


# -- discarding ---------------------------------------------------------------------------------


def test_zero_grad_discards(trainer, plain):
    expected = plain_gradients(plain.model, BATCH, CrossEntropy())
    for repeats in (1, 3, 0):
        for _ in range(repeats):
            trainer.forward_backward(BATCH, COTANGENTS)
        trainer.ranks.call("zero_grad")
        trainer.forward_backward(BATCH, CrossEntropy())
        assert largest_relative_difference(trainer.gradients(), expected) < 1e-5


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("calls", [1, 2])
def test_zero_grad_discards_what_a_failure_left_half_way(trainer, plain, where, calls):
    expected = plain_gradients(plain.model, BATCH, CrossEntropy())
    trainer.forward_backward(BATCH, CrossEntropy())
    trainer.ranks.call(arctic_ranks.break_layer, where, calls)
    row_by_row = Trainer(trainer.ranks, token_budget=1)  # so that every rank has two passes
    with pytest.raises(RankFailed, match=f"broken {where}"):
        row_by_row.forward_backward(BATCH, COTANGENTS)
    for _ in range(2):
        trainer.ranks.call("zero_grad")
        trainer.forward_backward(BATCH, CrossEntropy())
        assert largest_relative_difference(trainer.gradients(), expected) < 1e-5


# -- steps --------------------------------------------------------------------------------------


def test_steps_are_those_of_torch_with_the_knobs_of_each_call(trainer, plain):
    knobs = [
        AdamW(lr=0.02, betas=(0.8, 0.95), eps=0.3, weight_decay=0.1),
        AdamW(lr=0.005, betas=(0.9, 0.99), eps=0.6, weight_decay=0.0, max_grad_norm=2.0),
        AdamW(lr=0.01, betas=(0.5, 0.9), eps=0.3, weight_decay=0.3, max_grad_norm=1e6),
    ]
    for count, options in enumerate(knobs, 1):
        for each in (trainer, plain):
            each.forward_backward(BATCH, CrossEntropy())
            each.forward_backward(BATCH, COTANGENTS)
        expected = plain.step(options)
        result = trainer.step(options)
        assert result.grad_norm == pytest.approx(expected, rel=1e-5)
        assert (result.skipped, result.steps) == (False, count)
        assert largest_relative_difference(trainer.weights(), plain.weights()) < 1e-5


def test_a_step_is_torch_s_on_the_very_same_gradients(trainer, plain):
    """With the usual tiny eps, where the rounding of a gradient near 0 shows."""
    options = AdamW(lr=0.001, max_grad_norm=0.5)
    trainer.forward_backward(BATCH, COTANGENTS)
    plain.add(trainer.gradients())
    trainer.ranks.call("reset")
    trainer.forward_backward(BATCH, COTANGENTS)
    trainer.step(options)
    plain.step(options)
    assert largest_relative_difference(trainer.weights(), plain.weights()) < 1e-6


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (Reinforce(scale=3e38), STEADY),
        (Reinforce(scale=1e25), STEADY),
        (Reinforce(), AdamW(lr=1e39)),
        (Reinforce(), AdamW(lr=1e30, weight_decay=1e9)),
        (CrossEntropy(scale=0.0), AdamW(lr=0.1, eps=0.0, betas=(0.0, 0.0))),
    ],
    ids=["gradient", "its square", "lr", "decay", "eps"],
)
def test_a_step_that_is_not_finite_changes_nothing(trainer, plain, loss, options):
    def before_and_after(trained):
        trained.forward_backward(BATCH, COTANGENTS)
        trained.step(STEADY)

    for each in (trainer, plain):
        before_and_after(each)
    weights = trainer.weights()
    trainer.forward_backward(BATCH, loss)
    result = trainer.step(options)
    assert (result.skipped, result.steps) == (True, 1)
    assert same(trainer.weights(), weights)
    for each in (trainer, plain):
        before_and_after(each)
    assert largest_relative_difference(trainer.weights(), plain.weights()) < 1e-5


def test_a_gradient_that_is_not_finite_is_told_by_its_norm(trainer):
    trainer.forward_backward(BATCH, Reinforce(scale=3e38))
    assert not math.isfinite(trainer.step(STEADY).grad_norm)
    trainer.forward_backward(BATCH, Reinforce())
    assert math.isfinite(trainer.step(STEADY).grad_norm)


def test_measuring_moves_nothing(trainer):
    before = trainer.weights()
    trainer.forward_backward(BATCH, COTANGENTS)
    assert not trainer.step(MEASURE).skipped
    assert same(trainer.weights(), before)
    assert all(torch.isfinite(each).all() for each in before.values())
