"""Shim (loop side, above the client): SkyRL's configuration, checked before anything starts.

Imports SkyRL's configuration, remote_rl, the table of keys and the rules of all shims.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

from skyrl.backends.skyrl_train.inference_servers.engine_utils import (
    get_sampling_params_for_backend,
)
from skyrl.train.config import SkyRLTrainConfig

from ..common.rules import Table, find, refuse, refuse_unknown, refuse_values
from .keys import TABLE
from .losses import check_loss
from .optimizer import constants
from .options import Options
from .rules import FULLY_ASYNC, SYNC
from .sampling import to_params

_Leaf = tuple[str, Any, "dataclasses.Field[Any]"]


def check(config: SkyRLTrainConfig, table: Table = TABLE) -> Options:
    """All that can be refused before anything starts; returns the shim's options.

    table: what is known of the keys. Raises `UnsupportedError` or `InvalidRequestError`, each
    naming SkyRL's own key.
    """
    options = Options.of(config)
    check_keys(config, table)
    for check_one in (_check_reference, _check_folders, _check_temperature):
        check_one(config)
    check_loss(config.trainer.algorithm)
    constants(config.trainer.policy.optimizer_config)
    generator, backend = config.generator, config.generator.inference_engine.backend
    for name in ("sampling_params", "eval_sampling_params"):
        section = getattr(generator, name)
        _check_additional(f"generator.{name}", section, backend)
        given = get_sampling_params_for_backend(backend, section)
        to_params(given, path=f"generator.{name}")
    return options


def check_keys(config: SkyRLTrainConfig, table: Table = TABLE) -> None:
    """Refuses values that can't be honoured, all of them in one error, then keys of SkyRL's own
    sections that the table lacks, where they are set away from their default."""
    leaves = list(_leaves(config))
    reading = ((path, partial(getattr, node, field.name)) for path, node, field in leaves)
    refuse_values(reading, table, mode_of(config))
    for path, node, field in leaves:
        if find(path, table) is None and _is_skyrls(node, field) and not _is_default(node, field):
            refuse_unknown(path, table)


def mode_of(config: SkyRLTrainConfig) -> str:
    """Which of SkyRL's trainers is asked for."""
    return FULLY_ASYNC if config.trainer.fully_async.enabled else SYNC


def prepare(config: SkyRLTrainConfig) -> None:
    """Sets what SkyRL would do with accelerators of its own cluster, so that its own checks and
    trainers look for none; the table says so of each key."""
    placement, engine = config.trainer.placement, config.generator.inference_engine
    placement.colocate_all = placement.colocate_policy_ref = False
    placement.policy_num_nodes = placement.policy_num_gpus_per_node = 1
    placement.ref_num_nodes = placement.ref_num_gpus_per_node = 1
    engine.num_engines = engine.tensor_parallel_size = 1
    engine.pipeline_parallel_size = engine.data_parallel_size = engine.expert_parallel_size = 1
    engine.run_engines_locally = True
    engine.enable_ray_prometheus_stats = False
    config.trainer.enable_ray_gpu_monitor = False
    for section in (config.trainer.policy, config.trainer.ref, config.trainer.critic):
        section.sequence_parallel_size = 1


def _leaves(node: Any, path: str = "") -> Iterator[_Leaf]:
    """(path, section that holds it, field) of all that is no section."""
    for field in dataclasses.fields(node):
        below = f"{path}.{field.name}" if path else field.name
        value = getattr(node, field.name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, below)
        else:
            yield below, node, field


def _is_skyrls(node: Any, field: dataclasses.Field[Any]) -> bool:
    """Whether SkyRL itself declares the key, rather than a section that the user wrote."""
    return any(
        field.name in vars(each).get("__annotations__", {})
        for each in type(node).__mro__
        if each.__module__.partition(".")[0] == "skyrl"
    )


def _is_default(node: Any, field: dataclasses.Field[Any]) -> bool:
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return bool(getattr(node, field.name) == default)


def _check_reference(config: SkyRLTrainConfig) -> None:
    algorithm, trainer = config.trainer.algorithm, config.trainer
    needed = algorithm.use_kl_loss or algorithm.use_kl_in_reward
    if needed and trainer.ref.model.path != trainer.policy.model.path:
        refuse(
            "trainer.ref.model.path",
            trainer.ref.model.path,
            "the reference is what the run's policy was at its start; set it to "
            f"trainer.policy.model.path ({trainer.policy.model.path})",
        )


def _check_folders(config: SkyRLTrainConfig) -> None:
    for name in ("ckpt_path", "export_path"):
        value = str(getattr(config.trainer, name))
        if "://" in value:
            refuse(
                f"trainer.{name}",
                value,
                "weights lie in the server's checkpoint_dir, and here only their names; give a "
                "local folder",
            )


def _check_temperature(config: SkyRLTrainConfig) -> None:
    temperature = config.trainer.algorithm.temperature
    if temperature is None or temperature <= 0:
        refuse(
            "trainer.algorithm.temperature",
            temperature,
            "logprobs are trained at it; give a positive one",
        )


def _check_additional(path: str, section: Any, backend: str) -> None:
    """What SkyRL sets itself for every request, and so drops from there without a word."""
    without = dataclasses.replace(section, additional_kwargs=None)
    own = get_sampling_params_for_backend(backend, without)
    for name, value in (section.additional_kwargs or {}).items():
        if name in own:
            refuse(
                f"{path}.additional_kwargs.{name}",
                value,
                f"SkyRL itself says {name}={own[name]!r} and ignores another one; leave it out",
            )
