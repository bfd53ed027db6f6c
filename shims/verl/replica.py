"""Shim (loop side, above the client): the rollout replica that verl's trainers control.

Imports verl and remote_rl. It launches nothing: the server samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from remote_rl import errors

from . import sessions
from .config import Options


class RemoteReplica(RolloutReplica):
    """Stands for the sampling half of the run; verl calls it from the trainer's process."""

    async def launch_servers(self) -> None:
        """Attaches to the run. Agent loops reach the server themselves, so there is no Ray actor
        for the load balancer to hand out."""
        options = Options.of(self.config)
        self._session = sessions.member(self._handle(options))
        operations = (await self._session.info()).capabilities.operations
        self._sleeps = self.config.free_cache_engine and "sleep" in operations
        self._server_address = options.url
        self._server_handle = None

    async def init_standalone(self) -> None:
        """Without a pool or workers of its own."""
        self.rollout_mode = RolloutMode.STANDALONE
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

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Ends all that the run generates and holds what comes, until `resume_generation`."""
        if reject_request:
            raise errors.UnsupportedError(
                "abort_all_requests(reject_request=True) is not supported: the server holds "
                "requests while generation is paused, it does not reject them"
            )
        await self._session.sampling.pause()
        await self._session.sampling.abort()

    async def resume_generation(self) -> None:
        """Lets generation go on."""
        await self._session.sampling.resume()

    async def clear_kv_cache(self) -> None:
        """Drops what the sampler cached of earlier prompts."""
        await self._session.sampling.reset_prefix_cache()

    def _handle(self, options: Options) -> Mapping[str, Any] | None:
        return options.handle
