"""verl's configuration: every key is known, what can't be honoured is refused by its own name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from omegaconf import OmegaConf

from remote_rl import errors
from shims.verl.config import Options, check, check_keys
from shims.verl.keys import ENGINE, MAPPED, SECTIONS, VERL, Only

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def test_the_training_of_the_tests_is_accepted(config: Callable[..., Any]) -> None:
    options = check(config())
    assert options == Options(url="http://127.0.0.1:7700")
    assert options.start == "base"


def test_every_key_of_stock_verl_is_in_a_table(config: Callable[..., Any]) -> None:
    stock = config()
    for path, section in SECTIONS.items():
        unknown = set(OmegaConf.select(stock, path)) - set(section)
        assert not unknown, f"{path} has keys that no table knows"


def test_every_rule_is_of_a_known_kind() -> None:
    for section in SECTIONS.values():
        for key, rule in section.items():
            assert isinstance(rule, Only) or rule in (MAPPED, VERL, ENGINE), key


def test_stock_defaults_that_the_shim_refuses_name_their_key(stock_config: Any) -> None:
    with pytest.raises(errors.UnsupportedError, match=r"trainer\.n_gpus_per_node=8"):
        check_keys(stock_config)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("algorithm.adv_estimator=gae", "algorithm.adv_estimator"),
        ("algorithm.adv_estimator=optimal_token_baseline", "algorithm.adv_estimator"),
        ("critic.enable=true", "critic.enable"),
        ("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_rank"),
        ("actor_rollout_ref.model.lora.rank=8", "actor_rollout_ref.model.lora.rank"),
        ("actor_rollout_ref.model.mtp.enable=true", "actor_rollout_ref.model.mtp.enable"),
        ("actor_rollout_ref.hybrid_engine=false", "actor_rollout_ref.hybrid_engine"),
        ("distillation.enabled=true", "distillation.enabled"),
        ("trainer.nnodes=2", "trainer.nnodes"),
        ("trainer.default_hdfs_dir=hdfs://x", "trainer.default_hdfs_dir"),
        ("reward.reward_model.enable=true", "reward.reward_model.enable_resource_pool"),
        (f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.name"),
        (f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.tensor_model_parallel_size"),
        (f"{ROLLOUT}.ignore_eos=true", f"{ROLLOUT}.ignore_eos"),
        (f"{ROLLOUT}.full_determinism=true", f"{ROLLOUT}.full_determinism"),
        (f"{ROLLOUT}.logprobs_mode=raw_logprobs", f"{ROLLOUT}.logprobs_mode"),
        (f"{ROLLOUT}.temperature=0", f"{ROLLOUT}.temperature"),
        (f"{ROLLOUT}.checkpoint_engine.backend=nccl", f"{ROLLOUT}.checkpoint_engine.backend"),
        (f"{ACTOR}.policy_loss.loss_mode=vanila", f"{ACTOR}.policy_loss.loss_mode"),
        (f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor"),
        (f"{ACTOR}.kl_loss_type=full", f"{ACTOR}.kl_loss_type"),
        (f"{ACTOR}.freeze_vision_tower=true", f"{ACTOR}.freeze_vision_tower"),
        (f"{ACTOR}.fsdp_config.qat.enable=true", f"{ACTOR}.fsdp_config.qat.enable"),
        (f"{ACTOR}.optim.optimizer=AdamW8bit", f"{ACTOR}.optim.optimizer"),
        (f"{ACTOR}.optim.optimizer_impl=bitsandbytes.optim", f"{ACTOR}.optim.optimizer_impl"),
        (f"{ACTOR}.optim.clip_grad=0", f"{ACTOR}.optim.clip_grad"),
        (
            f"{ACTOR}.optim.override_optimizer_config={{amsgrad: true}}",
            f"{ACTOR}.optim.override_optimizer_config.amsgrad",
        ),
        (f"{ACTOR}.checkpoint.async_save=true", f"{ACTOR}.checkpoint.async_save"),
        (
            f"{ACTOR}.checkpoint.save_contents=[model,hf_model]",
            f"{ACTOR}.checkpoint.save_contents",
        ),
        (f"{ACTOR}.checkpoint.load_contents=[optimizer]", f"{ACTOR}.checkpoint.load_contents"),
        (f"{ACTOR}.entropy_cof=0.1", f"{ACTOR}.entropy_cof"),
        (f"{ROLLOUT}.custom_key=1", f"{ROLLOUT}.custom_key"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_key(
    config: Callable[..., Any], override: str, key: str
) -> None:
    with pytest.raises(errors.UnsupportedError) as raised:
        check(config(override))
    assert key in str(raised.value)
    assert raised.value.details["key"] == key


def test_an_unknown_key_gets_the_nearest_one(config: Callable[..., Any]) -> None:
    with pytest.raises(errors.UnsupportedError, match="'entropy_coeff'"):
        check(config(f"{ACTOR}.entropy_cof=0.1"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"{ROLLOUT}.engine_kwargs.remote_rl.url=''", r"engine_kwargs\.remote_rl\.url is missing"),
        (f"{ROLLOUT}.engine_kwargs.remote_rl.urll=x", "did you mean 'url'"),
        (f"{ROLLOUT}.engine_kwargs.remote_rl.generation_attempts=0", "generation_attempts"),
        (f"{ROLLOUT}.engine_kwargs.remote_rl.takeover=maybe", "takeover"),
    ],
)
def test_wrong_options_of_the_shim_itself(
    config: Callable[..., Any], override: str, message: str
) -> None:
    with pytest.raises(errors.InvalidRequestError, match=message):
        check(config(override))
