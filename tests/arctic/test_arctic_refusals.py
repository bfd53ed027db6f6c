"""Which models and adapters the policy takes, and which it refuses by name."""

import peft
import pytest
import torch
from arctic_models import tiny_model
from arctic_oracle import gradients_of, plain_outputs, random_batch
from transformers import LlamaForCausalLM

from backends.arctic.training.packing import pack
from backends.arctic.training.policy import PolicyModule
from remote_rl.errors import UnsupportedError

torch.set_num_threads(1)


class Sharpened(LlamaForCausalLM):
    """Changes its logits after the head, which no setting says."""

    def forward(self, *arguments, **keywords):
        result = super().forward(*arguments, **keywords)
        result.logits = result.logits * 1.5
        return result


def test_the_self_check_finds_logits_that_are_changed_after_the_head():
    model = Sharpened(tiny_model("llama").config)
    with pytest.raises(UnsupportedError, match=r"Sharpened.*differ from.*own logits by") as caught:
        PolicyModule(model).self_check()
    assert caught.value.details["difference"] > 1e-3


def with_setting(name, value, architecture="llama"):
    model = tiny_model(architecture)
    setattr(model.config, name, value)
    return model


def without_registry():
    model = tiny_model("llama")
    model._supports_attention_backend = False
    return model


def with_other_head():
    model = tiny_model("llama")
    model.lm_head = torch.nn.Sequential(model.lm_head)
    return model


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: with_setting("final_logit_softcapping", 30.0), "final_logit_softcapping=30"),
        (lambda: with_setting("logit_scale", 0.5), "logit_scale=0.5"),
        (lambda: with_setting("logits_scaling", 8.0), "logits_scaling=8"),
        (lambda: with_setting("is_encoder_decoder", True), "encoder-decoder"),
        (lambda: with_setting("vision_config", {"depth": 1}), "multimodal.*vision_config"),
        (
            lambda: with_setting("layer_types", ["full_attention", "linear_attention"], "qwen3"),
            "layers of kind 'linear_attention'",
        ),
        (
            lambda: tiny_model(
                "llama",
                rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
            ),
            r"rotary embedding \(dynamic\)",
        ),
        (lambda: tiny_model("llama", attention_dropout=0.1), "attention_dropout is 0.1"),
        (without_registry, "attention registry"),
        (with_other_head, "output layer is Sequential"),
    ],
)
def test_models_that_it_cannot_reproduce_are_refused_by_name(make, named):
    with pytest.raises(UnsupportedError, match=f"can't be trained here: .*{named}"):
        PolicyModule(make())


def test_settings_that_do_nothing_are_no_obstacle():
    model = with_setting("logit_scale", 1.0)
    model.config.final_logit_softcapping = None
    assert PolicyModule(model).self_check() < 1e-4


# -- adapters ---------------------------------------------------------------------------------


def with_adapter(config):
    model = tiny_model("qwen3")
    model.set_attn_implementation("sdpa")
    return peft.get_peft_model(model, config)


def test_a_lora_adapter_is_computed_and_only_it_gets_gradients():
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    model = with_adapter(adapter)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at the start, which would compare nothing
            torch.nn.init.normal_(parameter, std=0.2)
    batch = random_batch(3)
    adapted = plain_outputs(model, batch)["logprobs"].detach()
    with model.disable_adapter(), torch.no_grad():
        base = plain_outputs(model, batch)["logprobs"]
    assert float((adapted - base).abs().max()) > 0.1
    policy = PolicyModule(model, gradient_checkpointing=True, reentrant=True).train()
    assert policy.self_check() < 1e-4
    packed = pack(batch, "cpu")
    ours = policy(packed, frozenset({"logprobs"}))["logprobs"]
    torch.testing.assert_close(ours.detach(), adapted, rtol=0, atol=1e-4)
    with policy.model.disable_adapter(), torch.no_grad():
        without = policy(packed, frozenset({"logprobs"}))["logprobs"]
    torch.testing.assert_close(without, base, rtol=0, atol=1e-4)
    ours.sum().backward()
    gradients = gradients_of(policy)
    assert gradients
    assert all("lora_" in name for name in gradients)


@pytest.mark.parametrize(
    ("adapter", "named"),
    [
        (
            peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
            "adapter 'default'.*before the prompt.*use LoRA",
        ),
        (peft.LoraConfig(target_modules=["q_proj", "lm_head"]), "output layer is Linear"),
        (peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.1), "drops out with"),
        (peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]), "output layer"),
    ],
)
def test_adapters_that_it_cannot_compute_are_refused_by_name(adapter, named):
    with pytest.raises(UnsupportedError, match=named):
        PolicyModule(with_adapter(adapter))
