"""Ranks that train adapters only."""

from __future__ import annotations

import json

import arctic_ranks
import numpy as np
import peft
import pytest
import torch
from arctic_models import tiny_model, write_model
from arctic_oracle import (
    backward,
    largest_relative_difference,
    plain_outputs,
    random_batch,
    random_cotangents,
)
from arctic_ranks import RankFailed, Ranks
from arctic_training import STEADY, Plain, Trainer, same, tensors
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from backends.arctic.config import LoraConfig
from backends.arctic.training.answers import RankSettings
from backends.arctic.training.lora import Adapter
from backends.arctic.weights import segment
from remote_rl.errors import InvalidRequestError

BATCH = random_batch(6)
COTANGENTS = random_cotangents(BATCH)
LORA = LoraConfig(rank=3, alpha=12.0, targets=("q_proj", "v_proj", "down_proj"))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("base"), "qwen3", tied=True)


def settings(base, stage, **changes):
    options = {"path": str(base), "zero_stage": stage, "lora": LORA, "seed": 4, **changes}
    return RankSettings(**options)


@pytest.fixture(scope="module", params=[(1, 0), (2, 2), (2, 3)], ids=str)
def started(request, base):
    world, stage = request.param
    ranks = Ranks(world, settings(base, stage))
    yield ranks
    ranks.close()


@pytest.fixture
def trainer(started):
    started.call("reset")
    return Trainer(started)


def trained(trainer, steps=2):
    for _ in range(steps):
        trainer.forward_backward(BATCH, COTANGENTS)
        assert not trainer.step(STEADY).skipped
    return trainer.weights()


def logprobs(trainer, policy="current"):
    return trainer.forward(BATCH, policy)["logprobs"]


def adapted(base, directory):
    """What peft makes of the base and an exported adapter."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(model, directory / "adapter", is_trainable=True).eval()


def test_it_starts_as_the_base_and_the_reference_stays_the_base(trainer, base):
    plain = Plain(base).outputs(BATCH)["logprobs"]
    np.testing.assert_allclose(logprobs(trainer), plain, rtol=0, atol=2e-5)
    trained(trainer)
    assert np.abs(logprobs(trainer) - plain).max() > 1e-3
    np.testing.assert_allclose(logprobs(trainer, "reference"), plain, rtol=0, atol=2e-5)
    trainer.ranks.call("set_reference", "current")
    now = logprobs(trainer)
    trained(trainer)
    np.testing.assert_allclose(logprobs(trainer, "reference"), now, rtol=0, atol=3e-6)


def test_only_adapters_are_trained(trainer):
    facts = trainer.ranks.facts[0]
    weights = trained(trainer)
    assert all("lora_" in name for name in weights)
    assert facts.trained == sum(each.numel() for each in weights.values())
    assert facts.parameters > 10 * facts.trained
    assert not any("lora_" in name or "base_layer" in name for name in facts.forms)


def test_gradients_and_outputs_are_those_of_peft(trainer, base, tmp_path):
    trained(trainer)
    trainer.ranks.call("export", tmp_path / "export")
    model = adapted(base, tmp_path / "export")
    outputs = plain_outputs(model, BATCH)
    np.testing.assert_allclose(
        logprobs(trainer), outputs["logprobs"].detach().numpy(), rtol=0, atol=2e-5
    )
    backward(outputs, COTANGENTS, BATCH)
    expected = {
        name.replace(".default.", "."): each.grad
        for name, each in model.named_parameters()
        if each.grad is not None
    }
    trainer.forward_backward(BATCH, COTANGENTS)
    assert largest_relative_difference(trainer.gradients(), expected) < 1e-5


def test_the_export_holds_the_merged_model_and_the_adapter(trainer, base, tmp_path):
    weights = trained(trainer)
    trainer.ranks.call("export", tmp_path / "export")
    merged = Plain(tmp_path / "export").outputs(BATCH)["logprobs"]
    np.testing.assert_allclose(logprobs(trainer), merged, rtol=0, atol=3e-5)
    stored = load_file(tmp_path / "export" / "adapter" / "adapter_model.safetensors")
    assert same(stored, weights)
    told = json.loads((tmp_path / "export" / "adapter" / "adapter_config.json").read_text())
    assert (told["r"], told["lora_alpha"]) == (LORA.rank, LORA.alpha)
    assert sorted(told["target_modules"]) == sorted(LORA.targets)


def test_merged_weights_are_published_under_the_base_s_names(trainer, base, tmp_path):
    trained(trainer)
    trainer.ranks.call("export", tmp_path / "export")
    merged = load_file(tmp_path / "export" / "model.safetensors")
    name = segment.new_name()
    try:
        entries = trainer.ranks.call("publish", name)[0]
        held = segment.Segment.attach(name)
        assert same(tensors({each.name: held.array(each) for each in entries}), merged)
    finally:
        segment.unlink(name)
    before = load_file(base / "model.safetensors")
    assert before.keys() == merged.keys()
    changed = {name for name in merged if not torch.equal(merged[name], before[name])}
    assert changed == {name for name in merged if any(f".{each}." in name for each in LORA.targets)}


def test_a_checkpoint_of_the_adapter_goes_on_alike(trainer, base, tmp_path):
    trained(trainer)
    trainer.ranks.call("save", tmp_path / "here", True)
    size = sum(file.stat().st_size for file in (tmp_path / "here").iterdir())
    assert size < (base / "model.safetensors").stat().st_size
    expected = trained(trainer)
    trainer.ranks.call("load", tmp_path / "here", True)
    assert same(trained(trainer), expected)


def test_adapters_of_another_rank_are_refused(trainer, base, tmp_path):
    other = Ranks(1, settings(base, 0, lora=LoraConfig(rank=2)))
    other.call("save", tmp_path / "other", True)
    other.close()
    held = trained(trainer)
    with pytest.raises(RankFailed) as caught:
        trainer.ranks.call("load", tmp_path / "other", True)
    assert isinstance(caught.value.error, InvalidRequestError)
    assert same(trainer.weights(), held)


def test_zero_grad_discards(trainer):
    trainer.forward_backward(BATCH, COTANGENTS)
    expected = trainer.gradients()
    trainer.ranks.call("reset")
    trainer.forward_backward(BATCH, COTANGENTS)
    trainer.ranks.call(arctic_ranks.break_layer, "backward", 1)
    with pytest.raises(RankFailed, match="broken backward"):
        trainer.forward_backward(BATCH, COTANGENTS)
    trainer.ranks.call("zero_grad")
    trainer.forward_backward(BATCH, COTANGENTS)
    assert largest_relative_difference(trainer.gradients(), expected) < 1e-6


def test_targets_that_the_model_lacks_are_refused(base):
    with pytest.raises(RankFailed) as caught:
        Ranks(1, settings(base, 0, lora=LoraConfig(targets=("nowhere",))))
    assert isinstance(caught.value.error, InvalidRequestError)
    assert "nowhere" in str(caught.value.error)


def transposed():
    """Its layers hold their matrices the other way round, which a sum with B A would hide."""
    config = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2
    )
    return GPT2LMHeadModel(config)


@pytest.mark.parametrize(
    ("make", "target", "kind"),
    [
        (lambda: tiny_model("qwen3"), "embed_tokens", "Embedding"),
        (transposed, "c_attn", "Conv1D"),
    ],
)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_layers_whose_adapters_could_not_be_merged_are_refused(make, target, kind):
    with pytest.raises(InvalidRequestError, match=rf"targets name .*{target}, a {kind};"):
        Adapter(make(), LoraConfig(targets=("q_proj", target)), seed=0)
