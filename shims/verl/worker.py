"""Shim (loop side, above the client): the one worker of verl's actor group, which forwards.

Imports verl, torch, tensordict and remote_rl. It holds no model: each method hands verl's rows to
the run that the trainer attached to, as a member, and hands the results back.
"""

from __future__ import annotations

from typing import Any, ClassVar

from omegaconf import DictConfig
from tensordict import TensorDict
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.import_utils import import_external_libs
from verl.utils.profiler import DistProfiler, DistProfilerExtension

from remote_rl import Session, errors

from ..common.known_outputs import KnownOutputs
from . import NAME, sessions
from .aside import WeightsAside
from .batches import scalar
from .checkpoints import Checkpoints
from .config import Options
from .losses import is_named
from .metrics import Meter
from .optimizer import Optimizer
from .updates import forward, update


class ForwardingWorker(Worker, DistProfilerExtension):
    """Actor and reference in one, as verl's `ActorRolloutRefWorker` is, and what its
    `DetachActorWorker` adds.

    config: `actor_rollout_ref`. role: "actor_rollout", "actor_rollout_ref", or for the asynchronous
    trainer "actor" and "ref".
    """

    #: values of `mode` that verl calls `update_weights` with
    modes: ClassVar[tuple[str, ...]] = ("auto", "naive", NAME)

    def __init__(
        self, config: DictConfig, role: str, distillation_config: Any = None, **_: Any
    ) -> None:
        Worker.__init__(self)
        DistProfilerExtension.__init__(self, DistProfiler(rank=self.rank))
        self._config = config
        self._options = Options.of(config.rollout)
        for mesh in ("actor", "ref"):
            self._register_dispatch_collect_info(mesh_name=mesh, dp_rank=0, is_collect=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Attaches to the run; the server has built the model."""
        import_external_libs(self._config.model.get("external_lib"))
        self._session = self._attach()
        self._actor = omega_conf_to_dataclass(self._config.actor)
        # a named loss is computed on the server and needs no outputs here
        self._known = None if is_named(self._actor) else KnownOutputs()
        self._meter = Meter(self._session.info().result().devices)
        self._aside = WeightsAside(self._session)
        self._optimizer = Optimizer(self._actor.optim)
        self._checkpoints = Checkpoints(
            self._session,
            self._config.actor.checkpoint,
            random_state=not is_named(self._actor),
        )

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def compute_log_prob(self, data: TensorDict) -> TensorDict:
        """`log_probs` and, where asked for, `entropy` of the current policy, [B, P + R]."""
        outputs = {"logprobs"} | ({"entropy"} if scalar(data, "calculate_entropy") else set())
        return forward(self._session, data, outputs, "current", self._known, self._meter)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="ref"))
    def compute_ref_log_prob(self, data: TensorDict) -> TensorDict:
        """`log_probs` of the reference policy, the base weights, [B, P + R]."""
        return forward(self._session, data, {"logprobs"}, "reference", meter=self._meter)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def update_actor(self, data: TensorDict) -> TensorDict:
        """The mini-batches of one update; returns `metrics`."""
        metrics = update(
            self._session, self._actor, self._optimizer, data, self._known, self._meter
        )
        return tensordict_utils.get_tensordict({}, non_tensor_dict={"metrics": metrics})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def update_weights(
        self, global_steps: int | None = None, mode: str = "auto"
    ) -> dict[str, float]:
        """Trainer to sampler, on the server; samples carry `global_steps` from then on. Returns
        metrics, which verl's asynchronous trainer logs with the step."""
        if mode not in self.modes:
            raise errors.UnsupportedError(
                f"update_weights(mode={mode!r}) is not supported: weights go from trainer to "
                "sampler on the server; set "
                "actor_rollout_ref.rollout.checkpoint_engine.backend=naive"
            )
        receipt = self._session.weights.sync(
            in_flight=self._options.in_flight, label=global_steps
        ).result()
        return {
            "weights/version": receipt.version,
            "weights/bytes": receipt.bytes,
            "weights/seconds": receipt.seconds,
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_model_to_cpu(self, n: int) -> None:
        """Keeps the current weights aside, on the server."""
        self._aside.save(n)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def restore_model_from_cpu(self, n: int) -> None:
        """Makes the weights kept as `n` the current ones."""
        self._aside.restore(n)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def clear_cpu_model(self, n: int) -> None:
        """Forgets the weights kept as `n`."""
        self._aside.clear(n)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Blocks until the server holds the checkpoint and `local_path` its manifest."""
        self._checkpoints.save(local_path, global_step, max_ckpt_to_keep, self._optimizer.state())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        del_local_after_load: bool = False,
    ) -> None:
        """Loads what the manifest under `local_path` names. Nothing was copied to here, so
        `del_local_after_load` has nothing to delete, as in verl for a local path."""
        if local_path is None:
            return
        schedule = self._checkpoints.load(local_path)
        if schedule is not None:
            self._optimizer.restore(schedule)

    def _attach(self) -> Session:
        return sessions.member(self._options.handle)
