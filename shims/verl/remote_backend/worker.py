"""Shim (loop side, above the client): the shim's own worker, joined by the seam's handle.

Imports verl and remote_rl.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from omegaconf import DictConfig
from verl.remote_backend import RemoteBackendRegistry

from remote_rl import Session

from ..worker import ForwardingWorker


class SeamWorker(ForwardingWorker):
    """Actor and reference in one.

    config: `actor_rollout_ref`. main_config: the whole configuration. backend_handle: of
    `RemoteRun.reconnect_handle`.
    """

    #: verl calls `update_weights` without a mode, or with the name of its checkpoint engine
    modes: ClassVar[tuple[str, ...]] = (*ForwardingWorker.modes, "remote_backend")

    def __init__(
        self,
        config: DictConfig,
        role: str,
        *,
        main_config: DictConfig,
        backend_handle: Mapping[str, Any],
        **more: Any,
    ) -> None:
        super().__init__(config, role, **more)
        self._main_config = main_config
        self._backend_handle = backend_handle

    def _attach(self) -> Session:
        backend = RemoteBackendRegistry.get(self._main_config.trainer.remote_backend)
        joined = backend.from_config(self._main_config, handle=self._backend_handle)
        session: Session = joined.session
        return session
