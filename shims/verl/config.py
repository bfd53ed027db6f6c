"""Shim (loop side, above the client): verl's configuration checked; the shim's own options.

Imports attrs, omegaconf, remote_rl and the key tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from omegaconf import DictConfig, ListConfig, OmegaConf
from verl.utils.import_utils import import_external_libs

from remote_rl import errors
from remote_rl.types.fields import flag, integer, optional, text

from . import NAME
from .keys import SECTIONS, SINGLE_KEYS, Only
from .losses import check_loss
from .optimizer import constants

_OPTIONS_PATH = f"actor_rollout_ref.rollout.engine_kwargs.{NAME}"
_MISSING = object()


@attrs.frozen(kw_only=True)
class Options:
    """The shim's own options, under `actor_rollout_ref.rollout.engine_kwargs.remote_rl`.

    url: of the server. model: the name that the server must report, None accepts any.
    start: what a new training starts from: "base", "current" or a checkpoint's name on the server
    (a verl checkpoint found by `trainer.resume_mode` is loaded on top of it).
    takeover: revoke another driver's lease. generation_attempts: tries of one generation before
    the training is stopped. handle: set by the trainer for the members, never by the user.
    """

    url: str = attrs.field(validator=text())
    model: str | None = attrs.field(default=None, validator=optional(text()))
    start: str = attrs.field(default="base", validator=text())
    takeover: bool = attrs.field(default=False, validator=flag())
    generation_attempts: int = attrs.field(default=3, validator=integer(minimum=1))
    handle: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, rollout: Any) -> Options:
        """From verl's rollout section (an OmegaConf node or its dataclass)."""
        given = rollout.engine_kwargs.get(NAME)
        if isinstance(given, DictConfig):
            given = OmegaConf.to_container(given, resolve=True)
        if not given or not given.get("url"):
            raise errors.InvalidRequestError(
                f"{_OPTIONS_PATH}.url is missing; give the address that `remote-rl serve` printed"
            )
        known = [field.name for field in attrs.fields(cls)]
        for name in given:
            if name not in known:
                raise errors.InvalidRequestError(
                    f"{_OPTIONS_PATH}.{name} does not exist; {errors.nearest(name, known)}"
                )
        return cls(**given)


def check(config: DictConfig) -> Options:
    """All that can be refused before anything starts; returns the shim's options.

    Raises `UnsupportedError` or `InvalidRequestError`, each naming verl's own key.
    """
    # such a library may register losses of its own
    import_external_libs(config.actor_rollout_ref.model.get("external_lib"))
    check_keys(config)
    for refuse in (
        _check_critic,
        _check_checkpoint_contents,
        _check_reward_model,
        _check_rollout,
        _check_advantages,
    ):
        refuse(config)
    actor = config.actor_rollout_ref.actor
    check_loss(actor)
    constants(actor.optim)
    return Options.of(config.actor_rollout_ref.rollout)


def check_keys(config: DictConfig) -> None:
    """Refuses keys that no table knows and values that the shim can't honour."""
    for path, only in _rules(config):
        value = OmegaConf.select(config, path, default=_MISSING)
        if value is _MISSING or _plain(value) in only.values:
            continue
        legal = " or ".join(map(repr, only.values))
        raise errors.UnsupportedError(
            f"{path}={value!r} is not supported by trainer mode {NAME!r}: {only.because}; "
            f"set it to {legal}",
            key=path,
        )


def _rules(config: DictConfig) -> Iterator[tuple[str, Only]]:
    yield from SINGLE_KEYS.items()
    for path, section in SECTIONS.items():
        for key in OmegaConf.select(config, path, default={}):
            rule = section.get(key)
            if rule is None:
                raise errors.UnsupportedError(
                    f"{path}.{key} is not known to trainer mode {NAME!r}; "
                    f"{errors.nearest(key, section)}, or leave it out",
                    key=f"{path}.{key}",
                )
            if isinstance(rule, Only):
                yield f"{path}.{key}", rule


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, (ListConfig, list)) else value


def _check_critic(config: DictConfig) -> None:
    if config.critic.enable:
        _refuse("critic.enable", True, "a run holds one model, the policy; set it to False")
    if config.critic.enable is None and config.algorithm.adv_estimator == "gae":
        _refuse(
            "algorithm.adv_estimator",
            "gae",
            "it needs a critic and a run holds one model, the policy; set grpo or another "
            "estimator without values",
        )


def _check_advantages(config: DictConfig) -> None:
    estimator = config.algorithm.adv_estimator
    if "optimal_token_baseline" in str(estimator):
        _refuse(
            "algorithm.adv_estimator", estimator, "no backend declares the output sum_pi_squared"
        )


def _check_checkpoint_contents(config: DictConfig) -> None:
    checkpoint = config.actor_rollout_ref.actor.checkpoint
    for key in ("save_contents", "load_contents"):
        path = f"actor_rollout_ref.actor.checkpoint.{key}"
        contents = list(checkpoint[key])
        for name in contents:
            if name not in ("model", "optimizer", "extra"):
                _refuse(path, contents, f"{name!r} can't be written here; leave it out")
        if "model" not in contents:
            _refuse(path, contents, "a server's checkpoint always holds the model; add 'model'")


def _check_reward_model(config: DictConfig) -> None:
    reward_model = config.reward.reward_model
    if reward_model.enable and not reward_model.enable_resource_pool:
        _refuse(
            "reward.reward_model.enable_resource_pool",
            False,
            "a reward model has no accelerators to share with the policy here; set it to True",
        )


def _check_rollout(config: DictConfig) -> None:
    rollout = config.actor_rollout_ref.rollout
    if rollout.temperature <= 0:
        _refuse(
            "actor_rollout_ref.rollout.temperature",
            rollout.temperature,
            "logprobs are trained at it; give a positive one",
        )
    if rollout.calculate_log_probs and rollout.logprobs_mode != "processed_logprobs":
        _refuse(
            "actor_rollout_ref.rollout.logprobs_mode",
            rollout.logprobs_mode,
            "logprobs are those at the sampling temperature; set processed_logprobs",
        )


def _refuse(path: str, value: Any, because: str) -> None:
    raise errors.UnsupportedError(
        f"{path}={value!r} is not supported by trainer mode {NAME!r}: {because}", key=path
    )
