"""Snapshots, the reference and checkpoints of ranks: which weights a forward is of, and what comes
back from files, at whatever number of ranks and ZeRO stage they were written."""

from __future__ import annotations

import json

import arctic_ranks
import numpy as np
import pytest
import torch
from arctic_oracle import largest_relative_difference, random_batch, random_cotangents
from arctic_ranks import RankFailed, Ranks
from arctic_training import STEADY, Plain, Trainer, same, tensors
from safetensors.torch import load_file

from backends.arctic.training.answers import RankSettings
from backends.arctic.weights import segment
from remote_rl.errors import BackendError, ConflictError, InvalidRequestError
from remote_rl.losses import CrossEntropy

BATCH = random_batch(5)
COTANGENTS = random_cotangents(BATCH)


@pytest.fixture
def trainer(ranks):
    return Trainer(ranks)


def trained(trainer, steps=1, loss=COTANGENTS):
    """Takes steps, and gives the weights."""
    for _ in range(steps):
        trainer.forward_backward(BATCH, loss)
        assert not trainer.step(STEADY).skipped
    return trainer.weights()


def logprobs(trainer, policy="current"):
    return trainer.forward(BATCH, policy)["logprobs"]


def alike(left, right):
    """Up to what rounding does where weights lie elsewhere in memory."""
    np.testing.assert_allclose(left, right, rtol=0, atol=3e-6)


# -- snapshots and the reference ----------------------------------------------------------------


def test_each_policy_is_its_own_weights(trainer):
    base = logprobs(trainer)
    trained(trainer)
    one = logprobs(trainer)
    trainer.ranks.call("snapshot", "one")
    trained(trainer)
    two = logprobs(trainer)
    assert not np.allclose(base, one)
    assert not np.allclose(one, two)
    for policy, expected in (("one", one), ("reference", base), ("base", base), ("current", two)):
        alike(logprobs(trainer, policy), expected)
    trainer.ranks.call("set_reference", "one")
    trainer.ranks.call("drop_snapshot", "one")
    alike(logprobs(trainer, "reference"), one)
    trainer.ranks.call("set_reference", "current")
    trained(trainer)
    alike(logprobs(trainer, "reference"), two)
    trainer.ranks.call("set_reference", "base")
    alike(logprobs(trainer, "reference"), base)


def test_a_restored_snapshot_goes_on_as_from_there(trainer):
    trained(trainer)
    trainer.ranks.call("snapshot", "here")
    held = trainer.weights()
    trainer.forward_backward(BATCH, CrossEntropy())  # to be discarded
    trainer.ranks.call("restore_snapshot", "here")
    assert same(trainer.weights(), held)
    expected = trained(trainer)
    trainer.ranks.call("restore_snapshot", "here")
    assert same(trainer.weights(), held)
    # the optimizer went on, so only the weights are as before
    assert not same(trained(trainer), expected)


def test_weights_stay_where_a_forward_of_others_fails(trainer):
    trained(trainer)
    held, expected = trainer.weights(), logprobs(trainer)
    trainer.ranks.call(arctic_ranks.break_layer, "forward", 1)
    with pytest.raises(RankFailed, match="broken forward"):
        logprobs(trainer, "reference")
    trainer.ranks.call("zero_grad")
    alike(logprobs(trainer), expected)
    assert same(trainer.weights(), held)


def test_reset_is_a_new_run(trainer):
    start = trainer.weights()
    first = trained(trainer, 2)
    trainer.ranks.call("set_reference", "current")
    trainer.forward_backward(BATCH, COTANGENTS)
    trainer.ranks.call("reset")
    assert same(trainer.weights(), start)
    assert same(trained(trainer, 2), first)


# -- checkpoints --------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def foreign_checkpoints(tiny_models, tmp_path_factory):
    """By architecture, one that two ranks at ZeRO 3 saved after two steps, the reference set after
    the first; and ARCHITECTURE-after, one step later."""
    root = tmp_path_factory.mktemp("foreign")
    for name, path in tiny_models.items():
        ranks = Ranks(2, RankSettings(path=str(path), zero_stage=3))
        trainer = Trainer(ranks)
        trained(trainer)
        ranks.call("set_reference", "current")
        trained(trainer)
        assert ranks.call("save", root / name, True) == [True, True]
        trained(trainer)
        ranks.call("save", root / f"{name}-after", True)
        ranks.close()
    return root


def stored(directory, kind):
    found = {}
    for file in sorted(directory.glob(f"{kind}-*.safetensors")):
        found |= load_file(file)
    return found


def saved(trainer, directory, optimizer=True):
    answers = trainer.ranks.call("save", directory, optimizer)
    assert len(set(answers)) == 1
    return answers[0]


def test_resuming_equals_going_on(trainer, tmp_path):
    trained(trainer, 2)
    held = trainer.weights()
    assert not saved(trainer, tmp_path / "here")
    expected = trained(trainer, 2)
    trainer.forward_backward(BATCH, CrossEntropy())  # to be discarded
    trainer.ranks.call("load", tmp_path / "here", True)
    assert same(trainer.weights(), held)
    assert same(trained(trainer, 2), expected)


def test_a_checkpoint_of_other_ranks_and_stages_goes_on_alike(kind, trainer, foreign_checkpoints):
    directory = foreign_checkpoints / kind.architecture
    trained(trainer)
    trainer.ranks.call("load", directory, True)
    assert same(trainer.weights(), stored(directory, "weights"))
    for moment in ("exp_avg", "exp_avg_sq"):
        held = tensors(trainer.ranks.call(arctic_ranks.moments, moment)[0])
        assert same(held, stored(directory, moment))
    trainer.forward_backward(BATCH, COTANGENTS)
    assert trainer.step(STEADY).steps == 3
    after = stored(foreign_checkpoints / f"{kind.architecture}-after", "weights")
    assert largest_relative_difference(trainer.weights(), after) < 1e-6


def test_the_reference_is_in_the_checkpoint_where_it_is_not_the_base(trainer, tmp_path):
    base = logprobs(trainer)
    trained(trainer)
    trainer.ranks.call("set_reference", "current")
    reference = logprobs(trainer)
    trained(trainer)
    assert saved(trainer, tmp_path / "other")
    trainer.ranks.call("set_reference", "base")
    assert not saved(trainer, tmp_path / "base")
    trainer.ranks.call("load", tmp_path / "other", True)
    alike(logprobs(trainer, "reference"), reference)
    trainer.ranks.call("load", tmp_path / "base", True)
    alike(logprobs(trainer, "reference"), base)


def test_without_its_optimizer_a_checkpoint_starts_a_new_one(trainer, tmp_path):
    trained(trainer, 2)
    saved(trainer, tmp_path / "weights", optimizer=False)
    with pytest.raises(RankFailed) as caught:
        trainer.ranks.call("load", tmp_path / "weights", True)
    assert isinstance(caught.value.error, InvalidRequestError)
    trainer.ranks.call("load", tmp_path / "weights", False)
    moments = trainer.ranks.call(arctic_ranks.moments, "exp_avg_sq")[0]
    assert not any(each.any() for each in moments.values())
    trainer.forward_backward(BATCH, COTANGENTS)
    assert trainer.step(STEADY).steps == 1


def test_what_cannot_be_loaded_changes_nothing(kind, trainer, foreign_checkpoints, tmp_path):
    trained(trainer)
    held = trainer.weights()
    other = "llama" if kind.architecture != "llama" else "qwen3"
    damaged = tmp_path / "damaged"
    saved(trainer, damaged)
    last = sorted(damaged.glob("exp_avg_sq-*"))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    gone = tmp_path / "gone"
    saved(trainer, gone)
    sorted(gone.glob("weights-*"))[-1].unlink()
    for directory, error in (
        (foreign_checkpoints / other, InvalidRequestError),
        (damaged, ConflictError),
        (gone, ConflictError),
        (tmp_path / "nowhere", ConflictError),
    ):
        with pytest.raises(RankFailed) as caught:
            trainer.ranks.call("load", directory, True)
        assert isinstance(caught.value.error, error)
        assert same(trainer.weights(), held)


def test_a_full_disk_fails_the_save_alone(trainer, tmp_path):
    held = trained(trainer)
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    for method, arguments in (("save", (blocked / "here", True)), ("export", (blocked / "here",))):
        with pytest.raises(RankFailed) as caught:
            trainer.ranks.call(method, *arguments)
        assert isinstance(caught.value.error, ConflictError)
    assert same(trainer.weights(), held)
    saved(trainer, tmp_path / "here")


# -- exports and the sampler --------------------------------------------------------------------


def test_transformers_loads_an_export_to_the_same_outputs(trainer, tmp_path, kind, tiny_models):
    trained(trainer)
    trainer.ranks.call("export", tmp_path / "export")
    expected = Plain(tmp_path / "export").outputs(BATCH)
    np.testing.assert_allclose(logprobs(trainer), expected["logprobs"], rtol=0, atol=2e-5)
    names = load_file(tmp_path / "export" / "model.safetensors").keys()
    assert names == load_file(tiny_models[kind.architecture] / "model.safetensors").keys()
    told = json.loads((tmp_path / "export" / "config.json").read_text())
    before = json.loads((tiny_models[kind.architecture] / "config.json").read_text())
    for key in ("architectures", "model_type", "tie_word_embeddings", "eos_token_id", "dtype"):
        assert told[key] == before[key]


def test_all_weights_are_published_as_they_are(trainer):
    weights = trained(trainer)
    name = segment.new_name()
    try:
        entries, *others = trainer.ranks.call("publish", name)
        assert all(each == [] for each in others)
        held = segment.Segment.attach(name)
        assert same(tensors({each.name: held.array(each) for each in entries}), weights)
    finally:
        segment.unlink(name)
    assert {each.name: (each.shape, each.dtype) for each in entries} == trainer.ranks.facts[0].forms


def test_every_rank_lends_all_weights_whole_until_they_are_taken_back(trainer):
    """Each to the engine on its own GPU, which is stood for by copies."""
    weights = trained(trainer)
    forms = {name: (shape, "bfloat16") for name, (shape, _) in trainer.ranks.facts[0].forms.items()}
    for found, held in trainer.ranks.call(arctic_ranks.lent, forms):
        assert held
        assert {dtype for dtype, _ in found.values()} == {"bfloat16"}
        assert same(tensors({name: numbers for name, (_, numbers) in found.items()}), weights)


def test_what_the_sampler_does_not_expect_is_refused_before_a_segment_is_made(ranks):
    forms = dict(ranks.facts[0].forms)
    first = next(iter(forms))
    for wrong in (
        {name: form for name, form in forms.items() if name != first},
        forms | {"model.other.weight": ((3,), "float32")},
        forms | {first: ((1, 2), "float32")},
    ):
        name = segment.new_name()
        with pytest.raises(RankFailed) as caught:
            ranks.call("publish", name, wrong)
        assert isinstance(caught.value.error, InvalidRequestError)
        with pytest.raises(BackendError):
            segment.Segment.attach(name)


def test_weights_are_published_in_the_sampler_s_dtype(ranks):
    forms = {name: (shape, "bfloat16") for name, (shape, _) in ranks.facts[0].forms.items()}
    name = segment.new_name()
    try:
        entries = ranks.call("publish", name, forms)[0]
        assert {each.name: each.form for each in entries} == forms
        held = segment.Segment.attach(name)
        weights = tensors(ranks.call(arctic_ranks.masters)[0])
        for each in entries:
            bits = weights[each.name].to(torch.bfloat16).view(torch.uint16).numpy()
            np.testing.assert_array_equal(held.array(each), bits)
    finally:
        segment.unlink(name)
