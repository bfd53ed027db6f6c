"""Shim (loop side, above the client): SkyRL's trainers with the model on the server.

Imports SkyRL and remote_rl. Everything but where the model lives is SkyRL's own.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer
from skyrl.train.trainer import RayPPOTrainer

from remote_rl import Session

from .dispatch import RemoteDispatch
from .options import Options


class RemoteTraining(RayPPOTrainer):
    """Stands before one of SkyRL's trainers among the bases of a class.

    session: the driver's, which outlives the trainer. options: the shim's own; from the
    configuration where None.
    """

    dispatch: RemoteDispatch

    def __init__(
        self, *arguments: Any, session: Session, options: Options | None = None, **named: Any
    ) -> None:
        super().__init__(*arguments, **named)
        self._session = session
        self._options = Options.of(self.cfg) if options is None else options

    def build_models(
        self, PolicyWorker: Any = None, CriticWorker: Any = None, RefWorker: Any = None
    ) -> None:
        """Nothing is built here: the dispatch speaks to the run. The classes are ignored."""
        algorithm = self.cfg.trainer.algorithm
        self.dispatch = RemoteDispatch(
            self.cfg,
            self._session,
            self._options,
            steps=self._optimizer_steps(),
            global_step=lambda: self.global_step,
        )
        self.dispatch.set_inference_engine_client(self.inference_engine_client)
        self.policy_model, self.critic_model = self.dispatch, None
        # SkyRL asks only whether there is one
        wanted = algorithm.use_kl_loss or algorithm.use_kl_in_reward
        self.ref_model = self.dispatch if wanted else None
        devices = self._session.info().result().devices
        self._num_training_gpus = 1 if devices is None else devices.total

    def _optimizer_steps(self) -> int | None:
        if self.total_training_steps is None:
            return None
        section = self.cfg.trainer
        mini_batches = section.train_batch_size // section.policy_mini_batch_size
        steps: int = self.total_training_steps * mini_batches * section.update_epochs_per_batch
        return steps

    def train_critic_and_policy(self, data: TrainingInputBatch) -> dict[str, float]:
        """As SkyRL's, and logs which policies drew since the last step."""
        self.all_metrics.update(self.inference_engine_client.rollout_metrics())
        status: dict[str, float] = super().train_critic_and_policy(data)
        return status

    def fwd_logprobs_values_reward(self, training_input: TrainingInputBatch) -> TrainingInputBatch:
        """As SkyRL's; a forward is told which tokens are the response, so that prompts are shared
        and its outputs known again in the update."""
        self._response_mask = training_input["response_mask"]
        return super().fwd_logprobs_values_reward(training_input)

    def _execute_forward_pass(
        self,
        model: str,
        data_fwd_pass: TrainingInputBatch,
        key: str,
        mini_batch_boundaries: list[tuple[int, int]] | None,
    ) -> torch.Tensor:
        data_fwd_pass["response_mask"] = self._response_mask
        found: torch.Tensor = super()._execute_forward_pass(
            model, data_fwd_pass, key, mini_batch_boundaries
        )
        return found

    def update_ref_with_policy(self) -> None:
        """The reference becomes the policy as it is, on the server; nothing is exported for it."""
        self.dispatch.init_model("ref", self.cfg.trainer.policy.model.path)

    def _cleanup_old_checkpoints(self) -> None:
        self.dispatch.clean(
            os.fspath(self.cfg.trainer.ckpt_path), self.cfg.trainer.max_ckpts_to_keep
        )


class RemoteTrainer(RemoteTraining):
    """SkyRL's synchronous trainer."""

    def load_checkpoints(self) -> tuple[int, str | None]:
        """As SkyRL's, and where an epoch had ended with what SkyRL does between its last save and
        the next epoch: the data begin anew, and with `trainer.update_ref_every_epoch` the reference
        becomes the policy."""
        step, folder = super().load_checkpoints()
        if folder is not None and step % len(self.train_dataloader) == 0:
            self._begin_epoch()
            if self.cfg.trainer.update_ref_every_epoch and self.ref_model is not None:
                self.update_ref_with_policy()
        return step, folder

    def _begin_epoch(self) -> None:
        # the saved position is behind the last batch, and SkyRL would take the nothing that is
        # left for a whole epoch
        loader = self.train_dataloader
        position = loader.state_dict()
        if next(iter(loader), None) is not None:  # as with dynamic sampling
            loader.load_state_dict(position)


class RemoteAsyncTrainer(RemoteTraining, FullyAsyncRayPPOTrainer):
    """SkyRL's fully asynchronous trainer: generations go on while the policy is trained and synced
    (`trainer.fully_async.enabled=true`)."""
