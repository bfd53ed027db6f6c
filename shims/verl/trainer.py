"""Shim (loop side, above the client): verl's synchronous trainer, attached to a run as its driver.

Imports verl, ray and remote_rl. Everything but where the model lives is verl's own.
"""

from __future__ import annotations

from typing import Any

import ray
from omegaconf import DictConfig, open_dict
from verl.single_controller.ray import ResourcePoolManager
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.rollout.llm_server import LLMServerClient

from remote_rl import Session, connect

from . import NAME, failures
from .config import check
from .llm_client import RemoteLLMClient
from .matching import check_server, end_token_ids
from .pools import RemotePools
from .worker import ForwardingWorker

_ACTOR_ROLES = (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef, Role.RefPolicy)


@register_trainer(NAME)
class RemoteTrainer(PPOTrainerSync):
    """`trainer.v1.trainer_mode=remote_rl`."""

    resource_pool_manager: ResourcePoolManager

    def __init__(self, config: DictConfig) -> None:
        self._options = check(config)
        self._driver: Session | None = None
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"  # what the base class compares it with
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
        """As verl's; the run is given back at the end, whatever the end is."""
        assert self._driver is not None  # init attached it
        with self._driver:
            try:
                super().fit(agent_loop_manager)
            except RuntimeError as error:
                # where every generation of a step failed, verl itself stops, for another reason
                failures.raise_reported(cause=error)
                raise

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
        options = self._options
        self._driver = connect(
            options.url, model=options.model, start=options.start, takeover=options.takeover
        )
        info = self._driver.info().result()
        check_server(self.config, self.tokenizer, info)
        if self.use_reference_policy and options.start != "base":
            self._driver.training.set_reference("current").result()
        self._end_token_ids = end_token_ids(self.config, self.tokenizer, info)
        self._hints = info.capabilities.sampling_options & {"session_id", "priority"}
        own = self.config.actor_rollout_ref.rollout.engine_kwargs[NAME]
        with open_dict(own):
            own.handle = self._driver.handle().to_dict()

    def get_llm_client(self) -> LLMServerClient:
        """What agent-loop workers get."""
        return self.llm_server_manager.get_client(
            RemoteLLMClient, end_token_ids=self._end_token_ids, hints=self._hints
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

    def _get_n_gpus_for_throughput(self) -> int:
        return 1  # the server's accelerators are its own; throughput is that of the whole run
