"""Shim (loop side, above the client): the whole training, from SkyRL's command line to its end.

Imports SkyRL and remote_rl. SkyRL's dataset, generator, environments, tracker and trainer are its
own. No Ray cluster is started: nothing of this side runs elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from loguru import logger
from skyrl.backends.skyrl_train.inference_servers.utils import resolve_policy_model_name
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.utils import validate_cfg

from .attaching import Attached, attach
from .config import check, prepare
from .options import Options
from .sampler import RemoteSampler
from .section import config_class
from .trainer import RemoteAsyncTrainer, RemoteTrainer, RemoteTraining

#: SkyRL's own way to this module; no field of its configuration
_OVERRIDE = "trainer.override_entrypoint="


def parse(arguments: Sequence[str]) -> SkyRLTrainConfig:
    """SkyRL's configuration, with `trainer.remote`, from `key=value` arguments; refused by key
    where something can't be honoured."""
    given = [each for each in arguments if not each.startswith(_OVERRIDE)]
    return accept(config_class().from_cli_overrides(given))


def accept(config: SkyRLTrainConfig) -> SkyRLTrainConfig:
    """Checks a configuration, by the shim's table and by SkyRL's own rules, and sets what only
    local accelerators would need; returns it."""
    check(config)
    prepare(config)
    validate_cfg(config)
    return config


def run(arguments: Sequence[str]) -> None:
    """One training."""
    RemoteExperiment(parse(arguments)).run()


class RemoteExperiment(BasePPOExp):
    """SkyRL's experiment, trained and sampled on the run that `trainer.remote` names.

    cfg: accepted by `parse` or `accept`. Override its methods as those of `BasePPOExp`: datasets,
    generator, tracker.
    """

    def __init__(self, cfg: SkyRLTrainConfig) -> None:
        self._options = Options.of(cfg)
        self._attached: Attached | None = None
        super().__init__(cfg)

    def get_colocate_pg(self, timeout: int = 0) -> None:
        """None: no accelerator of SkyRL's cluster is used."""

    def get_inference_client(self) -> RemoteSampler:
        """Generates on the run."""
        attached = self._held()
        return RemoteSampler(
            attached.session,
            self.tokenizer,
            model_name=resolve_policy_model_name(self.cfg),
            info=attached.info,
            attempts=self._options.generation_attempts,
            resumes=self._options.in_flight == "abort",
            end_token_ids=attached.end_token_ids,
        )

    def get_trainer(
        self,
        cfg: SkyRLTrainConfig,
        tracker: Any,
        tokenizer: Any,
        train_dataset: Any,
        eval_dataset: Any,
        inference_engine_client: Any,
        generator: Any,
        colocate_pg: Any,
    ) -> RemoteTraining:
        """SkyRL's synchronous trainer, or its fully asynchronous one."""
        kind = RemoteAsyncTrainer if cfg.trainer.fully_async.enabled else RemoteTrainer
        return kind(
            cfg=cfg,
            tracker=tracker,
            tokenizer=tokenizer,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            inference_engine_client=inference_engine_client,
            generator=generator,
            colocate_pg=colocate_pg,
            session=self._held().session,
            options=self._options,
        )

    def _setup_trainer(self) -> RemoteTraining:
        """As SkyRL's, but for its worker classes, which need CUDA packages to import."""
        logger.info(self.get_cfg_as_str(self.cfg))
        os.makedirs(self.cfg.trainer.export_path, exist_ok=True)
        os.makedirs(self.cfg.trainer.ckpt_path, exist_ok=True)
        tracker = self.get_tracker()
        client = self.get_inference_client()
        trainer = self.get_trainer(
            cfg=self.cfg,
            tracker=tracker,
            tokenizer=self.tokenizer,
            train_dataset=self.train_dataset,
            eval_dataset=self.eval_dataset,
            inference_engine_client=client,
            generator=self.get_generator(self.cfg, self.tokenizer, client),
            colocate_pg=self.colocate_pg,
        )
        trainer.trajectory_logger = self.get_trajectory_logger()
        self.trainer = trainer
        trainer.build_models()
        return trainer

    def run(self) -> None:
        """Attaches as the run's driver, trains to the end, and gives the run back."""
        self._attached = attach(self.cfg, self._options, self.tokenizer)
        with self._attached.session:
            super().run()

    def _held(self) -> Attached:
        assert self._attached is not None, "run() attaches before anything is set up"
        return self._attached
