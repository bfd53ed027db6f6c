"""Shim (loop side, above the client): the seam's replica, the shim's own plus a server.

Imports ray, verl and remote_rl.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from ..config import Options
from ..replica import RemoteReplica
from .backend import SeamHandle
from .server import SeamServer


class SeamReplica(RemoteReplica):
    """Without a `backend_handle`, as the shim's own trainers make it, it is a `RemoteReplica`.

    main_config, backend_handle: as the seam's trainers pass them, see `SeamWorker`.
    """

    def __init__(
        self,
        *arguments: Any,
        main_config: Any = None,
        backend_handle: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(*arguments, **more)
        self._joined = None if backend_handle is None else SeamHandle.of(backend_handle)

    async def launch_servers(self) -> None:
        """Attaches to the run, and starts the actor that agent loops ask."""
        await super().launch_servers()
        if self._joined is not None:
            actor = ray.remote(SeamServer).options(max_concurrency=self.max_concurrency)
            server: Any = actor.remote(self.config, self._joined.to_dict())
            self._server_handle, self.servers = server, [server]

    async def sleep(self) -> None:
        """As the shim's own; verl calls it after every sampling, and here is where generations
        that failed stop the training."""
        await self._raise_failed()
        await super().sleep()

    async def set_global_steps(self, global_steps: int) -> None:
        """After new weights. Samples are labelled by the sync itself, so nothing is to be set."""
        await self._raise_failed()

    async def _raise_failed(self) -> None:
        for server in self.servers:
            await server.raise_failed.remote()

    def _handle(self, options: Options) -> Mapping[str, Any] | None:
        return super()._handle(options) if self._joined is None else self._joined.run
