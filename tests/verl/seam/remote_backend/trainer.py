"""The seam's trainer, as far as a plug-in can tell: what it makes, calls and reads, and in which
order. Checks what verl would trip over later, or not at all.

Imports verl's own Ray worker group, replica registry, advantages and metrics.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import DictConfig, OmegaConf
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.base import create_colocated_worker_cls
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.utils import tensordict_utils
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict
from verl.workers.rollout.replica import RolloutReplica, TokenOutput, get_rollout_replica_class

from .base import RemoteBackendRegistry
from .layouts import Columns, Jagged, Padded, Rollout, columns

_ROLE = "actor_rollout_ref"

Score = Callable[[list[int], list[int]], float]
Metrics = dict[str, float]


class RemoteBackendTrainer:
    """config: verl's whole configuration. v1: as PR #7102 drives a backend (jagged rows, weights
    with a mode), else as branch release/v0.7.1 does (padded rows, no mode)."""

    def __init__(self, config: DictConfig, *, v1: bool) -> None:
        self.config = config
        self.layout = Jagged() if v1 else Padded()
        self.v1 = v1
        self.global_steps = 0
        name = config.trainer.remote_backend
        self.worker_class = RemoteBackendRegistry.get_worker(name)
        assert self.worker_class is not None, f"no forwarder worker for {name!r}"
        self.backend = RemoteBackendRegistry.create(name, config)
        if self.backend.requires_single_forwarder():
            assert config.trainer.n_gpus_per_node * config.trainer.nnodes == 1
            assert config.actor_rollout_ref.rollout.agent.num_workers == 1
        handle = self.backend.reconnect_handle()
        assert pickle.loads(pickle.dumps(handle)) == json.loads(json.dumps(handle)) == handle
        self.more = {"main_config": config, "backend_handle": handle}

    def init_workers(self) -> None:
        """One worker without an accelerator, one replica that has a server to ask, asleep."""
        section = self.config.actor_rollout_ref
        made = RayClassWithInitArgs(
            cls=ray.remote(self.worker_class), config=section, role=_ROLE, **self.more
        )
        group = RayWorkerGroup(
            resource_pool=RayResourcePool([1], use_gpu=False, max_colocate_count=3),
            ray_cls_with_init=create_colocated_worker_cls({_ROLE: made}),
            device_name="cpu",
        )
        self.workers = group.spawn(prefix_set={_ROLE})[_ROLE]
        self.workers.init_model()
        replica_class = get_rollout_replica_class(section.rollout.name)
        assert issubclass(replica_class, RolloutReplica)
        self.replica = replica_class(
            replica_rank=0,
            config=section.rollout,
            model_config=section.model,
            gpus_per_node=section.rollout.n_gpus_per_node,
            **self.more,
        )
        asyncio.run(self.replica.init_hybrid(self.workers))
        assert isinstance(self.replica.server_handle, ray.actor.ActorHandle)
        assert isinstance(self.replica.server_address, str)
        asyncio.run(self.replica.sleep())

    def fit(self, prompts: Sequence[list[int]], score: Score, steps: int) -> list[Metrics]:
        """Resumes where it can, then GRPO up to step number `steps`; each step's metrics."""
        self._load_checkpoint()
        self._update_weights()
        rows = []
        while self.global_steps < steps:
            self.global_steps += 1
            rows.append(self._step(prompts, score))
        return rows

    def destroy(self) -> None:
        """As at the end of verl's training, good or bad, and once more."""
        for _ in range(2):
            asyncio.run(self.backend.destroy())

    def _step(self, prompts: Sequence[list[int]], score: Score) -> Metrics:
        rollouts = asyncio.run(self._generate(prompts, score))
        asyncio.run(self.replica.sleep())
        rollout = self.config.actor_rollout_ref.rollout
        dense = columns(rollouts, rollout.prompt_length, rollout.response_length)
        metrics: Metrics = {"score": float(np.mean([each.score for each in rollouts]))}
        self._old_logprobs(dense, metrics)
        self._reference_logprobs(dense)
        groups = np.array([each.group for each in rollouts], dtype=object)
        dense["advantages"], dense["returns"] = compute_grpo_outcome_advantage(
            dense["rm_scores"], dense["response_mask"], groups
        )
        metrics.update(self._update_actor(dense))
        self._save_checkpoint()
        self._update_weights()
        return metrics

    async def _generate(self, prompts: Sequence[list[int]], score: Score) -> list[Rollout]:
        rollout = self.config.actor_rollout_ref.rollout
        params = {
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k,
            "repetition_penalty": 1.0,
            "logprobs": rollout.calculate_log_probs,
        }

        async def one(group: str, prompt: list[int]) -> Rollout:
            output = await self.replica.server_handle.generate.remote(
                request_id=uuid.uuid4().hex,
                prompt_ids=prompt,
                sampling_params=dict(params),
                image_data=None,
                video_data=None,
            )
            assert isinstance(output, TokenOutput)
            assert 0 < len(output.token_ids) <= rollout.response_length
            assert len(output.log_probs) == len(output.token_ids)
            assert output.extra_fields["global_steps"] == self.global_steps - 1
            found = output.token_ids
            return Rollout(prompt, found, output.log_probs, group, score(prompt, found))

        groups = [(uuid.uuid4().hex, prompt) for prompt in prompts]
        return await asyncio.gather(
            *(one(group, prompt) for group, prompt in groups for _ in range(rollout.n))
        )

    def _send(self, dense: Columns, **meta: Any) -> Any:
        rows = len(dense["prompts"])
        call = {"temperature": self.config.actor_rollout_ref.rollout.temperature, **meta}
        call["global_token_num"] = dense["attention_mask"].sum(dim=1).tolist()
        sent = self.layout.send(dense, call)
        tensordict_utils.assign_non_tensor_stack(sent, "multi_modal_inputs", [{}] * rows)
        return sent

    def _old_logprobs(self, dense: Columns, metrics: Metrics) -> None:
        sent = self._send(dense, calculate_entropy=True, compute_loss=False)
        output = self.workers.compute_log_prob(sent)
        if not self.v1:
            metrics["infer_mfu"] = tensordict_utils.get(output, "metrics")["mfu"]
        entropy = self.layout.receive(tensordict_utils.get(output, "entropy"), sent)
        logprobs = self.layout.receive(tensordict_utils.get(output, "log_probs"), sent)
        width = dense["response_mask"].shape[1]
        assert entropy.dtype == logprobs.dtype == torch.float32
        dense["old_log_probs"] = _widened(logprobs, width)
        mask = dense["response_mask"].bool()
        gap = (dense["old_log_probs"].exp() - dense["rollout_log_probs"].exp()).abs()
        metrics["rollout_probs_diff"] = float(gap[mask].max())
        metrics["entropy"] = float(_widened(entropy, width)[mask].mean())

    def _reference_logprobs(self, dense: Columns) -> None:
        sent = self._send(dense, calculate_entropy=False, compute_loss=False)
        output = self.workers.compute_ref_log_prob(sent)
        logprobs = self.layout.receive(tensordict_utils.get(output, "log_probs"), sent)
        dense["ref_log_prob"] = _widened(logprobs, dense["response_mask"].shape[1])

    def _update_actor(self, dense: Columns) -> Metrics:
        actor = self.config.actor_rollout_ref.actor
        size = actor.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n
        sent = self._send(
            dense,
            calculate_entropy=actor.entropy_coeff != 0.0,
            global_batch_size=size,
            mini_batch_size=size,
            epochs=actor.ppo_epochs,
            seed=actor.data_loader_seed,
            dataloader_kwargs={"shuffle": actor.shuffle},
        )
        output = self.workers.update_actor(sent)
        found = rename_dict(tensordict_utils.get(output, "metrics"), "actor/")
        found["perf/mfu/actor"] = found.pop("actor/mfu")
        reduced: Metrics = reduce_metrics(found)
        return reduced

    def _update_weights(self) -> None:
        if not self.v1:
            ray.get(self.workers.update_weights(global_steps=self.global_steps))
            return
        mode = {"mode": "remote_backend"}
        ray.get(self.workers.update_weights(global_steps=self.global_steps, **mode))
        asyncio.run(self.replica.set_global_steps(self.global_steps))

    def _save_checkpoint(self) -> None:
        trainer = self.config.trainer
        folder = Path(trainer.default_local_dir) / f"global_step_{self.global_steps}"
        keep = trainer.max_actor_ckpt_to_keep
        self.workers.save_checkpoint(
            str(folder / "actor"), None, self.global_steps, max_ckpt_to_keep=keep
        )
        # verl writes this at once, so the checkpoint must be complete
        self._latest().write_text(str(self.global_steps))

    def _load_checkpoint(self) -> None:
        if self._latest().exists():
            self.global_steps = int(self._latest().read_text())
            folder = self._latest().parent / f"global_step_{self.global_steps}"
            self.workers.load_checkpoint(str(folder / "actor"), del_local_after_load=False)

    def _latest(self) -> Path:
        return Path(self.config.trainer.default_local_dir) / "latest_checkpointed_iteration.txt"


def with_seam_keys(config: DictConfig) -> DictConfig:
    """The keys that choose the backend, and the one that verl's trainer itself fills in."""
    OmegaConf.set_struct(config, False)
    config.trainer.remote_backend = "remote_rl"
    config.trainer.use_legacy_worker_impl = "disable"
    steps = config.trainer.total_training_steps
    config.actor_rollout_ref.actor.optim.total_training_steps = steps
    return config


def _widened(tensor: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(tensor.float(), (0, width - tensor.shape[1]))
