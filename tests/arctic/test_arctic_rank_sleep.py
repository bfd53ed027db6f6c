"""Ranks that give their memory back and take it again: what a CPU can show of it, which is all but
where the memory lies."""

from __future__ import annotations

import arctic_ranks
import pytest
from arctic_oracle import random_batch, random_cotangents
from arctic_ranks import RankFailed
from arctic_training import STEADY, Trainer, same

from remote_rl.losses import CrossEntropy

BATCH = random_batch(5)
COTANGENTS = random_cotangents(BATCH)


@pytest.fixture
def trainer(ranks):
    return Trainer(ranks)


def step(trainer, disturb=lambda: None):
    disturb()
    trainer.forward_backward(BATCH, COTANGENTS)
    disturb()
    trainer.forward_backward(BATCH, CrossEntropy())
    disturb()
    assert not trainer.step(STEADY).skipped


def test_nothing_is_changed_by_a_sleep_at_any_time(trainer, kind):
    """Before the first step and after it, with an empty and a full accumulator."""
    sizes = []

    def nap():
        given = trainer.ranks.call("sleep")
        assert trainer.ranks.call(arctic_ranks.memory) == [0] * kind.world
        assert trainer.ranks.call("sleep") == given
        trainer.ranks.call("wake")
        assert trainer.ranks.call(arctic_ranks.memory) == given
        trainer.ranks.call("wake")
        sizes.append(sum(given))

    step(trainer)
    step(trainer)
    expected = trainer.weights()
    moments = trainer.ranks.call(arctic_ranks.moments, "exp_avg_sq")[0]
    trainer.ranks.call("reset")
    step(trainer, nap)
    step(trainer, nap)
    assert same(trainer.weights(), expected)
    after = trainer.ranks.call(arctic_ranks.moments, "exp_avg_sq")[0]
    assert all((after[name] == moments[name]).all() for name in moments)
    # at the end gradient and both moments at least, and masters at ZeRO 1 to 3
    numbers = trainer.ranks.facts[0].parameters
    assert max(sizes) >= 4 * numbers * (3 if kind.stage == 0 else 4)


def test_a_rank_that_sleeps_says_so(trainer):
    trainer.ranks.call("sleep")
    try:
        with pytest.raises(RankFailed, match="is asleep; wake it first"):
            trainer.forward(BATCH)
    finally:
        trainer.ranks.call("wake")
    trainer.forward(BATCH)
