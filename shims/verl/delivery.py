"""Shim (loop side, above the client): weights from trainer to sampler while rollouts go on.

Imports verl, ray and remote_rl. verl's asynchronous trainer moves weights by a checkpoint engine
between its own workers; here the run moves them itself, so the engine is a name only.
"""

from __future__ import annotations

from typing import Any, NoReturn

import ray
from verl.checkpoint_engine import CheckpointEngineManager
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from remote_rl import errors

from . import NAME


@CheckpointEngineRegistry.register(NAME)
class ServerCheckpointEngine(CheckpointEngine):
    """`actor_rollout_ref.rollout.checkpoint_engine.backend=remote_rl`: says that weights stay on
    the server. Nothing can be sent through it."""

    def __init__(self, bucket_size: int = 0, **_: Any) -> None:
        self._bucket_size = bucket_size

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise errors.UnsupportedError(
            f"checkpoint_engine.backend={NAME} carries no weights between verl's workers: the "
            f"server's trainer and sampler exchange them; use it with trainer mode {NAME!r} or "
            "its asynchronous counterpart only"
        )

    prepare = init_process_group = finalize = send_weights = receive_weights = _refuse

    @classmethod
    def build_topology(cls, *_: Any, **__: Any) -> NoReturn:
        """There is none: the workers exchange nothing."""
        cls()._refuse()


class ServerDelivery(CheckpointEngineManager):
    """As verl's manager, but a delivery is one operation of the run.

    Nothing is aborted from here: what rollouts that run do meanwhile is the operation's own
    `in_flight`.
    """

    def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        """Blocks until samples are of the trainer's weights and carry `global_steps`; returns the
        delivery's metrics."""
        metrics: dict[str, Any] = {}
        for told in ray.get(
            self.actor_wg.update_weights(global_steps=global_steps, mode=self.backend)
        ):
            metrics.update(told)
        return metrics
