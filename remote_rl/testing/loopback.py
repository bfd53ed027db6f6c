"""Testing: a backend behind a real HTTP server on a free loopback port, in a thread of this process
(imports the dispatcher, the server and the client's loop thread)."""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from ..client.loop import LoopThread
from ..dispatcher import DEFAULT_BUDGET, Clock, Dispatcher
from ..protocol import Backend
from ..server.app import application, runner

T = TypeVar("T")

#: how long connections may stay open once the server ends
_SHUTDOWN_SECONDS = 0.5


class LoopbackServer:
    """Serves one run from the constructor to `stop`.

    url, port: where. dispatcher: the run, for tests that look inside. stopped: it has ended.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        checkpoint_dir: str | Path | None = None,
        lease_seconds: float = 60.0,
        stall_timeout: float = 300.0,
        budget_bytes: int = DEFAULT_BUDGET,
        clock: Clock | None = None,
        port: int = 0,
    ) -> None:
        self.dispatcher = Dispatcher(
            backend,
            checkpoint_dir=checkpoint_dir,
            lease_seconds=lease_seconds,
            stall_timeout=stall_timeout,
            budget_bytes=budget_bytes,
            clock=clock,
        )
        self.stopped = False
        self._loop = LoopThread()
        try:
            self.port = self.run(self._start(port))
        except BaseException:
            self._loop.stop()
            raise
        self.url = f"http://127.0.0.1:{self.port}"

    async def _start(self, port: int) -> int:
        await self.dispatcher.start()
        self._runner = runner(application(self.dispatcher), shutdown_seconds=_SHUTDOWN_SECONDS)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        return int(self._runner.addresses[0][1])

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the server's loop and waits."""
        return self._loop.run(coroutine)

    def stop(self, *, quietly: bool = False) -> None:
        """Ends it; `quietly` as a crash does: nobody is told anything. A second call does
        nothing."""
        if self.stopped:
            return
        self.stopped = True

        async def end() -> None:
            if not quietly:
                await self.dispatcher.close()
            await self._runner.cleanup()
            if quietly:
                await self.dispatcher.close()

        try:
            self.run(end())
        finally:
            self._loop.stop()
