"""Shim (loop side, above the client): the rollout replica that verl's trainer puts to sleep.

Imports verl and remote_rl. It launches nothing: the server samples.
"""

from __future__ import annotations

from verl.workers.rollout.replica import RolloutReplica

from . import sessions
from .config import Options


class RemoteReplica(RolloutReplica):
    """Stands for the sampling half of the run; verl calls it from the trainer's process."""

    async def launch_servers(self) -> None:
        """Attaches to the run. Agent loops reach the server themselves, so there is no Ray actor
        for the load balancer to hand out."""
        options = Options.of(self.config)
        self._session = sessions.member(options.handle)
        operations = (await self._session.info()).capabilities.operations
        self._sleeps = self.config.free_cache_engine and "sleep" in operations
        self._server_address = options.url
        self._server_handle = None

    async def init_standalone(self) -> None:
        """Without a pool of its own."""
        await self.launch_servers()

    async def sleep(self) -> None:
        """Lets the sampler give its memory back (`rollout.free_cache_engine`); the next weights or
        generation wake it."""
        if self._sleeps:
            await self._session.sleep("sampling")

    async def wake_up(self) -> None:
        """Wakes the sampler ahead of time."""
        if self._sleeps:
            await self._session.wake("sampling")
