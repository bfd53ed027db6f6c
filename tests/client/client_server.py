"""The HTTP server in this process, on a loop and thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from remote_rl.dispatcher import Clock, Dispatcher
from remote_rl.server.app import application, runner

T = TypeVar("T")


class Server:
    """A dispatcher behind a loopback port, from the constructor to `stop`."""

    def __init__(
        self,
        backend: Any,
        *,
        checkpoint_dir: Path | None = None,
        lease_seconds: float = 60.0,
        stall_timeout: float = 300.0,
        clock: Clock | None = None,
        port: int = 0,
    ) -> None:
        self.dispatcher = Dispatcher(
            backend,
            checkpoint_dir=checkpoint_dir,
            lease_seconds=lease_seconds,
            stall_timeout=stall_timeout,
            clock=clock,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test server")
        self._thread.start()
        self._stopped = False
        try:
            self.port = self.run(self._start(port))
        except BaseException:
            self._end_thread()
            raise
        self.url = f"http://127.0.0.1:{self.port}"

    async def _start(self, port: int) -> int:
        await self.dispatcher.start()
        self._runner = runner(application(self.dispatcher), shutdown_seconds=0.5)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        return int(self._runner.addresses[0][1])

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs on the server's loop and waits."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def stop(self, *, quietly: bool = False) -> None:
        """Ends it; `quietly` as a crash does: nobody is told anything."""
        if self._stopped:
            return
        self._stopped = True

        async def end() -> None:
            if not quietly:
                await self.dispatcher.close()
            await self._runner.cleanup()
            if quietly:
                await self.dispatcher.close()

        self.run(end())
        self._end_thread()

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
