"""Shim (loop side, above the client): what verl's trainers have in common once the model is remote.

Imports verl, ray and remote_rl. Everything but where the model lives is verl's own.
"""

from __future__ import annotations

from typing import Any, ClassVar

import ray
from omegaconf import DictConfig, open_dict
from verl.single_controller.ray import ResourcePoolManager
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.workers.rollout.llm_server import LLMServerClient, LLMServerManager

from remote_rl import Session, errors

from . import NAME, failures
from .config import check
from .driver import attach
from .llm_client import RemoteLLMClient
from .lost import LOST, run_lost
from .metrics import STEP_NAMES
from .pools import RemotePools
from .watch import Watch, between_looks, looking_every
from .worker import ForwardingWorker

_ACTOR_ROLES = (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef, Role.RefPolicy)


class AttachedTrainer(PPOTrainer):
    """Attaches to the run as its driver, forwards the model's work and gives the run back.

    Stands before one of verl's trainers among the bases of a class; `verl_mode` is the name that
    verl itself has for that one.
    """

    verl_mode: ClassVar[str]
    resource_pool_manager: ResourcePoolManager

    def __init__(self, config: DictConfig) -> None:
        self._options = check(config)
        self._driver: Session | None = None
        self._watch = Watch()
        with open_dict(config):
            config.trainer.v1.trainer_mode = self.verl_mode  # what verl's classes compare it with
        super().__init__(config)

    def init(self) -> None:
        """As verl's; a failure gives the run back."""
        try:
            super().init()
        except BaseException:
            if self._driver is not None:
                self._driver.detach()
            raise

    def fit(self, agent_loop_manager: Any) -> None:
        """As verl's; the run is given back at the end, whatever the end is. Raises `RunLostError`
        with the last checkpoint where there is no run any more."""
        assert self._driver is not None  # init attached it
        # a manager of the user's own may have none
        workers = getattr(agent_loop_manager, "agent_loop_workers", ())
        self._watch.over("an agent-loop worker", workers)
        self._watch.over("a reward worker", self.get_reward_handles() or ())
        with self._driver:
            try:
                self._fit(agent_loop_manager)
            except LOST as error:
                raise run_lost(self.config, error) from error

    def _fit(self, agent_loop_manager: Any) -> None:
        try:
            super().fit(agent_loop_manager)
            self._clear()
        except errors.RemoteRLError:
            raise
        except Exception as error:
            # without generations verl itself may stop first, for another reason
            failures.raise_reported(cause=error)
            raise

    def _clear(self) -> None:
        """Removes from the run what only the training needed."""

    def _build_replay_buffer(self) -> Any:
        replay_buffer = looking_every(super()._build_replay_buffer(), self._options.poll_seconds)
        return between_looks(replay_buffer, self._check_members)

    def _check_members(self) -> None:
        failures.raise_reported()
        self._watch.check()

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        self._attach()
        for role in _ACTOR_ROLES:
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(ForwardingWorker)
        self.resource_pool_manager = RemotePools(
            resource_pool_spec=self.resource_pool_manager.resource_pool_spec, mapping=self.mapping
        )

    def _attach(self) -> None:
        driver = attach(self.config, self._options, self.tokenizer)
        self._driver, self._devices = driver.session, driver.devices
        self._end_token_ids, self._hints = driver.end_token_ids, driver.hints
        own = self.config.actor_rollout_ref.rollout.engine_kwargs[NAME]
        with open_dict(own):
            own.handle = self._driver.handle().to_dict()

    def _serving(self) -> LLMServerManager:
        """verl's manager of the replicas that agent loops generate with."""
        return self.llm_server_manager

    def get_llm_client(self) -> LLMServerClient:
        """What agent-loop workers get."""
        return self._serving().get_client(
            RemoteLLMClient,
            end_token_ids=self._end_token_ids,
            hints=self._hints,
            resumes=self.verl_mode != "sync",
        )

    def on_sample_end(self) -> None:
        """Stops rather than trains without the generations that failed."""
        failures.raise_reported()
        super().on_sample_end()

    def on_validate_end(self) -> None:
        """Stops rather than reports a validation without the generations that failed."""
        failures.raise_reported()
        super().on_validate_end()

    def _add_prompts_to_generate(self, num_prompts: int) -> int:
        failures.raise_reported()  # else a dead server is refilled without end
        added: int = super()._add_prompts_to_generate(num_prompts)
        return added

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        updated = super()._update_actor(batch, metrics)
        for name in STEP_NAMES.keys() & metrics.keys():
            metrics[STEP_NAMES[name]] = metrics.pop(name)
        return updated

    def _get_n_gpus_for_throughput(self) -> int:
        return 1 if self._devices is None else self._devices.total  # the server's
