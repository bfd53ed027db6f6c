"""Shim (loop side, above the client): verl's configuration, checked before anything starts.

Imports verl, omegaconf, remote_rl and the table of keys.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.core_algos import AdvantageEstimator
from verl.utils.import_utils import import_external_libs

from remote_rl import errors

from ..common.rules import Table, find, refuse, refuse_unknown, refuse_values, sections
from . import ASYNC_NAME
from .keys import CLOSED, TABLE
from .losses import check_loss
from .optimizer import constants
from .options import PATH, Options
from .rules import SEPARATE_ASYNC, SYNC

__all__ = ["Options", "check", "check_keys"]

_ACTOR = "actor_rollout_ref.actor"
_CORRECTION = "algorithm.rollout_correction"
_ROLLOUT = "actor_rollout_ref.rollout"

_Leaf = tuple[str, DictConfig, str]


def check(config: DictConfig, table: Table = TABLE) -> Options:
    """All that can be refused before anything starts; returns the shim's options.

    config: verl's whole configuration. table: what is known of its keys.
    Raises `UnsupportedError` or `InvalidRequestError`, each naming verl's own key.
    """
    # such a library may register losses of its own
    import_external_libs(config.actor_rollout_ref.model.get("external_lib"))
    check_keys(config, table)
    for check_one in (
        _check_advantages,
        _check_checkpoint_contents,
        _check_correction,
        _check_model_overrides,
        _check_reward_model,
        _check_rollout,
    ):
        check_one(config)
    actor = config.actor_rollout_ref.actor
    check_loss(actor)
    constants(actor.optim)
    options = Options.of(config.actor_rollout_ref.rollout)
    if options.handle is not None:
        raise errors.InvalidRequestError(
            f"{PATH}.handle is written by the trainer when it attaches; leave it out"
        )
    return options


def check_keys(config: DictConfig, table: Table = TABLE) -> None:
    """Refuses values that can't be honoured, all of them in one error, then unknown keys."""
    leaves = list(_leaves(config, sections(table)))
    reading = ((path, partial(_value, node, name)) for path, node, name in leaves)
    refuse_values(reading, table, mode_of(config))
    estimators = {each.value for each in AdvantageEstimator}
    own_estimator = str(config.algorithm.adv_estimator) not in estimators
    for path, _, _ in leaves:
        section = path.partition(".")[0]
        if find(path, table) is not None or section not in CLOSED:
            continue
        if section == "algorithm" and own_estimator:
            continue  # an advantage estimator that the user registered reads its own keys there
        refuse_unknown(path, table)


def mode_of(config: DictConfig) -> str:
    """verl's name of the mode that the shim's trainer mode stands for."""
    given = OmegaConf.select(config, "trainer.v1.trainer_mode", default=None)
    return SEPARATE_ASYNC if given in (ASYNC_NAME, SEPARATE_ASYNC) else SYNC


def _leaves(node: DictConfig, inner: Collection[str], path: str = "") -> Iterator[_Leaf]:
    """(path, node that holds it, name) of all that is no section of the table (`inner`)."""
    for name in node:
        below = f"{path}.{name}" if path else str(name)
        if below not in inner:
            yield below, node, str(name)
            continue
        section = _value(node, str(name), plainly=False)
        if isinstance(section, DictConfig):
            yield from _leaves(section, inner, below)
        elif section is not None:  # None: the section is absent
            raise errors.InvalidRequestError(f"{below} must be a section, not {section!r}")


def _value(node: DictConfig, name: str, plainly: bool = True) -> Any:
    if OmegaConf.is_missing(node, name):
        return "???"
    value = node[name]
    if plainly and OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True)
    return value


def _check_advantages(config: DictConfig) -> None:
    estimator = config.algorithm.adv_estimator
    critic = OmegaConf.select(config, "critic.enable", default=None)
    if critic is None and estimator == "gae":
        refuse(
            "algorithm.adv_estimator",
            "gae",
            "it needs a critic and a run holds one model, the policy; set grpo or another "
            "estimator without values",
        )
    if "optimal_token_baseline" in str(estimator):
        refuse(
            "algorithm.adv_estimator", estimator, "no backend declares the output sum_pi_squared"
        )


def _check_checkpoint_contents(config: DictConfig) -> None:
    checkpoint = config.actor_rollout_ref.actor.checkpoint
    for key in ("save_contents", "load_contents"):
        path = f"{_ACTOR}.checkpoint.{key}"
        contents = list(checkpoint[key])
        for name in contents:
            if name not in ("model", "optimizer", "extra"):
                refuse(path, contents, f"{name!r} can't be written here; leave it out")
        if "model" not in contents:
            refuse(path, contents, "a server's checkpoint always holds the model; add 'model'")


def _check_correction(config: DictConfig) -> None:
    """What verl's V1 trainer would not apply, and not say so."""
    correction = config.algorithm.get("rollout_correction") or {}
    logprobs = config.actor_rollout_ref.rollout.calculate_log_probs
    bypass = correction.get("bypass_mode")
    own_loss = config.actor_rollout_ref.actor.policy_loss.loss_mode == "bypass_mode"
    if bypass and not logprobs:
        refuse(f"{_CORRECTION}.bypass_mode", True, f"set {_ROLLOUT}.calculate_log_probs=True")
    for key in ("rollout_is", "rollout_rs"):
        value = correction.get(key)
        if value is None:
            continue
        if not logprobs:
            refuse(f"{_CORRECTION}.{key}", value, f"set {_ROLLOUT}.calculate_log_probs=True")
        if bypass and not own_loss:
            refuse(
                f"{_CORRECTION}.{key}",
                value,
                "verl's V1 trainer does not read it in bypass mode; set "
                f"{_ACTOR}.policy_loss.loss_mode=bypass_mode and give it under "
                f"{_ACTOR}.policy_loss.rollout_correction, or leave it out",
            )


def _check_model_overrides(config: DictConfig) -> None:
    for key, value in (config.actor_rollout_ref.model.get("override_config") or {}).items():
        if key != "attn_implementation":  # another way to the same values
            refuse(
                f"actor_rollout_ref.model.override_config.{key}",
                value,
                "it changes the model, which is the server's; serve a model whose own "
                "configuration says so",
            )


def _check_reward_model(config: DictConfig) -> None:
    reward_model = OmegaConf.select(config, "reward.reward_model", default={})
    if reward_model.get("enable") and not reward_model.get("enable_resource_pool"):
        refuse(
            "reward.reward_model.enable_resource_pool",
            False,
            "a reward model has no accelerators to share with the policy here; set it to True",
        )


def _check_rollout(config: DictConfig) -> None:
    rollout = config.actor_rollout_ref.rollout
    if rollout.temperature <= 0:
        refuse(
            f"{_ROLLOUT}.temperature",
            rollout.temperature,
            "logprobs are trained at it; give a positive one",
        )
    mode = rollout.get("logprobs_mode", "processed_logprobs")
    if rollout.calculate_log_probs and mode != "processed_logprobs":
        refuse(
            f"{_ROLLOUT}.logprobs_mode",
            mode,
            "logprobs are those at the sampling temperature; set processed_logprobs",
        )
