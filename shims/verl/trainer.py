"""Shim (loop side, above the client): verl's trainers over a run of remote_rl, by their names.

Imports verl and remote_rl.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from omegaconf import DictConfig
from verl.checkpoint_engine import CheckpointEngineManager
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.rollout.llm_server import LLMServerManager

from remote_rl import errors

from . import ASYNC_NAME, NAME, failures
from .attached import AttachedTrainer
from .delivery import ServerDelivery


@register_trainer(NAME)
class RemoteTrainer(AttachedTrainer, PPOTrainerSync):
    """`trainer.v1.trainer_mode=remote_rl`: verl's `sync`."""

    verl_mode = "sync"


@register_trainer(ASYNC_NAME)
class RemoteAsyncTrainer(AttachedTrainer, PPOTrainerSeparateAsync):
    """`trainer.v1.trainer_mode=remote_rl_separate_async`: verl's `separate_async`, configured by
    its own section `trainer.v1.separate_async`."""

    verl_mode = "separate_async"
    standalone_checkpoint_manager: CheckpointEngineManager

    def __init__(self, config: DictConfig) -> None:
        if not hasattr(PPOTrainerSeparateAsync, "_enable_hybrid_replicas"):
            raise errors.UnsupportedError(
                f"trainer mode {ASYNC_NAME!r} needs verl 0.9.1: earlier ones have no "
                "actor_rollout_ref.hybrid_engine=False"
            )
        super().__init__(config)

    def _setup(self) -> None:
        with _without_info(PPOTrainerSeparateAsync.__module__):
            super()._setup()
        stock = self.standalone_checkpoint_manager
        self.standalone_checkpoint_manager = ServerDelivery(
            config=stock.config, actor_wg=stock.actor_wg, replicas=stock.replicas
        )

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        failures.forget()  # a checkpoint holds the notes of the training that saved it, too

    def _clear(self) -> None:
        self.actor_rollout_wg.clear_cpu_model(0)  # decoupled PPO's last

    def _serving(self) -> LLMServerManager:
        return self.standalone_server_manager


@contextmanager
def _without_info(module: str) -> Iterator[None]:
    """verl 0.9.1 logs the end of `_setup` with an argument that loggers don't take
    (`logger.info(..., flush=True)`), which raises at its own default level."""
    logger = logging.getLogger(module)
    level = logger.level
    logger.setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        logger.setLevel(level)
