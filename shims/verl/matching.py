"""Shim (loop side, above the client): what verl is set to do against what the server offers.

Imports verl's configuration and remote_rl. Runs once, when the trainer has attached; everything
refused here would else fail in the middle of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import need_reference_policy
from verl.utils.config import omega_conf_to_dataclass

from remote_rl import RunInfo, errors

from ..common.offers import Need, check_offers, check_vocabulary, missing_end_ids, sampling_needs
from . import NAME
from .config import Options
from .losses import build_loss, is_named
from .sampling import Limits, to_params

_ROLLOUT = "actor_rollout_ref.rollout"


def check_server(config: DictConfig, tokenizer: Any, info: RunInfo) -> None:
    """Raises `UnsupportedError`, naming verl's key, for the first thing the server lacks."""
    _check_model(config, tokenizer, info)
    check_offers(info, _needs(config))
    if config.trainer.save_freq > 0 and not info.checkpoint_dir:
        raise errors.UnsupportedError(
            f"trainer.save_freq={config.trainer.save_freq} needs a server that can save; start it "
            "with --checkpoint-dir, or set trainer.save_freq=-1",
            key="trainer.save_freq",
        )


def end_token_ids(config: DictConfig, tokenizer: Any, info: RunInfo) -> tuple[int, ...]:
    """The end-of-sequence ids of verl's tokenizer and generation config that the server's model
    does not end a response at by itself."""
    model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    generation = model.generation_config
    return missing_end_ids(info, tokenizer.eos_token_id, getattr(generation, "eos_token_id", None))


def _check_model(config: DictConfig, tokenizer: Any, info: RunInfo) -> None:
    check_vocabulary(
        info,
        len(tokenizer),
        key="actor_rollout_ref.model.path",
        path=config.actor_rollout_ref.model.path,
    )
    rollout = config.actor_rollout_ref.rollout
    context = info.model.context_length
    longest = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    if context is not None and longest > context:
        raise errors.UnsupportedError(
            f"{_ROLLOUT}.prompt_length={rollout.prompt_length} plus response_length="
            f"{rollout.response_length} exceeds the {context} tokens of the server's model "
            f"{info.model.name!r}; shorten data.max_prompt_length or data.max_response_length",
            key=f"{_ROLLOUT}.prompt_length",
        )


def _needs(config: DictConfig) -> Iterator[Need]:
    actor = config.actor_rollout_ref.actor
    for name in ("forward", "forward_backward", "optim_step", "sync", "generate"):
        yield "operations", name, "trainer.v1.trainer_mode"
    if config.trainer.save_freq > 0:
        for name in ("save", "load"):
            yield "operations", name, "trainer.save_freq"
    loss = "Cotangents"
    if is_named(actor):
        loss = type(build_loss(actor, tokens=1, sequences=1, entropy=True)).__name__
    yield "losses", loss, "actor_rollout_ref.actor.policy_loss.loss_mode"
    for name in ("logprobs", "entropy"):
        yield "outputs", name, "trainer.v1.trainer_mode"
    if need_reference_policy(config):
        start = Options.of(config.actor_rollout_ref.rollout).start
        if start != "base":
            yield "operations", "set_reference", f"{_ROLLOUT}.engine_kwargs.{NAME}.start"
    in_flight = Options.of(config.actor_rollout_ref.rollout).in_flight
    yield "in_flight", in_flight, f"{_ROLLOUT}.engine_kwargs.{NAME}.in_flight"
    if OmegaConf.select(config, "trainer.v1.trainer_mode") == "separate_async":
        yield from _decoupled_needs(config)
    yield "optimizers", "AdamW", "actor_rollout_ref.actor.optim.optimizer"
    yield from _sampling_needs(config)


def _decoupled_needs(config: DictConfig) -> Iterator[Need]:
    correction = config.algorithm.get("rollout_correction") or {}
    if not correction.get("bypass_mode", False):
        for name in ("snapshot", "restore_snapshot", "drop_snapshot"):
            yield "operations", name, "algorithm.rollout_correction.bypass_mode"


def _sampling_needs(config: DictConfig) -> Iterator[Need]:
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    given = [(_ROLLOUT, rollout, rollout.calculate_log_probs)]
    if trainer.val_before_train or trainer.test_freq > 0:
        given.append((f"{_ROLLOUT}.val_kwargs", rollout.val_kwargs, rollout.calculate_log_probs))
    limits = Limits(prompt_length=rollout.prompt_length, response_length=rollout.response_length)
    for path, section, logprobs in given:
        asked = {name: section[name] for name in ("temperature", "top_p", "top_k")}
        params = to_params({**asked, "logprobs": logprobs}, prompt_tokens=1, limits=limits)
        keys = {name: f"{path}.{name}" for name in asked}
        yield from sampling_needs(params, keys, f"{_ROLLOUT}.calculate_log_probs")
