"""Arctic backend: sampling engines that have died are started again (imports the contract; no Ray,
since whoever starts may stand in for them)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

from remote_rl.errors import BackendError, RemoteRLError

if TYPE_CHECKING:
    from .sampler_worker import SamplerWorker

log = logging.getLogger("remote_rl.arctic")

#: of an engine that died; one that is killed again while it starts gets another try
_MOST_STARTS = 3


class Revival:
    """start: starts one engine. patience: seconds that it may take."""

    def __init__(self, start: Callable[[SamplerWorker], Awaitable[None]], patience: float) -> None:
        self._start = start
        self._patience = patience
        self._closing = False
        self._starting: dict[SamplerWorker, asyncio.Task[None]] = {}

    @property
    def running(self) -> list[asyncio.Task[None]]:
        """The starts that are under way."""
        return list(self._starting.values())

    def of(self, workers: Iterable[SamplerWorker]) -> None:
        """Starts those that are not there."""
        for worker in workers:
            if not (worker.ready or worker in self._starting or self._closing):
                log.error("%s", worker.failure or f"{worker.name} is started again")
                self._starting[worker] = asyncio.create_task(
                    self._revive(worker), name=f"start of {worker.name}"
                )

    async def _revive(self, worker: SamplerWorker) -> None:
        try:
            for _ in range(_MOST_STARTS):
                if await self._started_again(worker):
                    log.info(
                        "%s is there again; it serves after the next weights.sync", worker.name
                    )
                    return
        finally:
            del self._starting[worker]

    async def _started_again(self, worker: SamplerWorker) -> bool:
        try:
            async with asyncio.timeout(self._patience):
                await self._start(worker)
        except (RemoteRLError, TimeoutError) as error:
            late = isinstance(error, TimeoutError)
            why = f"not within {self._patience:g} s" if late else str(error)
            worker.failure = BackendError(
                f"{worker.name} could not be started again ({why}); weights.sync tries it anew",
                worker=worker.name,
                traceback=str(getattr(error, "details", {}).get("traceback", "")),
            )
            log.error("%s", worker.failure)
            worker.end()
            return False
        return True

    def close(self) -> None:
        """Ends what is under way, and starts nothing more."""
        self._closing = True
        for task in self._starting.values():
            task.cancel()
