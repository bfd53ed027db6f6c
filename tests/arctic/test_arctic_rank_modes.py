"""Ranks that recompute activations, and ranks that compute in bfloat16 with float32 masters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from arctic_models import write_model
from arctic_oracle import (
    largest_relative_difference,
    plain_gradients,
    random_batch,
    random_cotangents,
)
from arctic_ranks import Ranks
from arctic_training import STEADY, Plain, Trainer, same, tensors

from backends.arctic.training.answers import RankSettings
from backends.arctic.weights import segment
from remote_rl.errors import UnsupportedError
from remote_rl.losses import CrossEntropy
from remote_rl.types import AdamW

BATCH = random_batch(8)
COTANGENTS = random_cotangents(BATCH)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), "qwen3", tied=True)


@pytest.mark.parametrize(("world", "stage"), [(1, 2), (2, 3)])
def test_recomputed_activations_give_the_same_gradients(model, world, stage):
    ranks = Ranks(
        world, RankSettings(path=str(model), zero_stage=stage, gradient_checkpointing=True)
    )
    trainer, plain = Trainer(ranks), Plain(model)
    for _ in range(2):
        before = trainer.forward(BATCH)["logprobs"]
        np.testing.assert_allclose(before, plain.outputs(BATCH)["logprobs"], rtol=0, atol=2e-5)
        trainer.forward_backward(BATCH, COTANGENTS)
        expected = plain_gradients(plain.model, BATCH, COTANGENTS)
        assert largest_relative_difference(trainer.gradients(), expected) < 1e-5
    ranks.close()


def test_bfloat16_without_float32_gradients_is_refused(model):
    for stage in (0, 1):
        with pytest.raises(UnsupportedError, match=f"zero_stage 2 or 3, not {stage}"):
            RankSettings(path=str(model), dtype="bfloat16", zero_stage=stage)


@pytest.fixture(scope="module", params=[(1, 2), (2, 2), (2, 3)], ids=str)
def narrow(request, model):
    world, stage = request.param
    ranks = Ranks(world, RankSettings(path=str(model), dtype="bfloat16", zero_stage=stage))
    yield ranks
    ranks.close()


@pytest.fixture
def trainer(narrow):
    narrow.call("reset")
    return Trainer(narrow)


def trained(trainer, steps=2, options=STEADY):
    for _ in range(steps):
        trainer.forward_backward(BATCH, COTANGENTS)
        assert not trainer.step(options).skipped
    return trainer.weights()


def test_bfloat16_gradients_are_near_those_of_float32(trainer, model):
    expected = plain_gradients(Plain(model).model, BATCH, CrossEntropy())
    for repeats in (0, 2):
        for _ in range(repeats):
            trainer.forward_backward(BATCH, COTANGENTS)
        trainer.ranks.call("zero_grad")
        trainer.forward_backward(BATCH, CrossEntropy())
        assert largest_relative_difference(trainer.gradients(), expected) < 0.05


def test_steps_too_small_for_bfloat16_add_up_in_the_masters(trainer):
    before = trainer.weights()
    after = trained(trainer, 3, AdamW(lr=1e-6, weight_decay=0.0))
    moved = max(float((after[name] - before[name]).abs().max()) for name in after)
    assert 2e-6 < moved < 4e-6


def test_bfloat16_policies_and_checkpoints_come_back(trainer, tmp_path):
    base = trainer.forward(BATCH)["logprobs"]
    held = trained(trainer)
    now = trainer.forward(BATCH)["logprobs"]
    np.testing.assert_array_equal(trainer.forward(BATCH, "reference")["logprobs"], base)
    np.testing.assert_array_equal(trainer.forward(BATCH)["logprobs"], now)
    trainer.ranks.call("save", tmp_path / "here", True)
    expected = trained(trainer)
    assert trainer.ranks.call("load", tmp_path / "here", True) == [False] * trainer.ranks.world
    assert same(trainer.weights(), held)
    assert same(trained(trainer), expected)


def test_bfloat16_weights_are_published_and_exported_as_the_model_has_them(trainer, tmp_path):
    masters = trained(trainer)
    name = segment.new_name()
    try:
        entries = trainer.ranks.call("publish", name)[0]
        held = segment.Segment.attach(name)
        bits = tensors({each.name: held.array(each) for each in entries})
    finally:
        segment.unlink(name)
    expected = {name: each.to(torch.bfloat16) for name, each in masters.items()}
    assert same(bits, {name: each.view(torch.uint16) for name, each in expected.items()})
    trainer.ranks.call("export", tmp_path / "export")
    plain = Plain(tmp_path / "export").weights()
    assert same(plain, {name: each.float() for name, each in expected.items()})
