"""Client: the background thread whose event loop talks to the dispatcher (imports asyncio only)."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
log = logging.getLogger("remote_rl.client")

#: seconds for tasks to end that have been cancelled
_PATIENCE = 5.0


class LoopThread:
    """An event loop on a daemon thread, apart from any loop of the caller's, so that blocking and
    async callers are served alike. `when_broken` is called, there, if the loop ends by itself."""

    def __init__(self) -> None:
        self.when_broken: Callable[[], None] | None = None
        self._stopping = self._ended = False
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="remote_rl client", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:  # a SystemExit in a task of the backend's own ends a loop, for instance
            self._ended = True
            if not self._stopping and self.when_broken is not None:
                self.when_broken()

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs a coroutine there; callable from any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Calls a function there, soon; callable from any thread."""
        self.loop.call_soon_threadsafe(function, *arguments)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine there and waits; an interrupt of the wait cancels it. Where the loop
        has ended by itself it runs once more, for this."""
        if self._ended:
            self._thread.join()
            with ThreadPoolExecutor(1) as elsewhere:  # the caller may be inside a loop of its own
                return elsewhere.submit(self.loop.run_until_complete, coroutine).result()
        future = self.spawn(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Ends the loop and its thread; what still runs there is cancelled."""
        if self.loop.is_closed():
            return
        self._stopping = True
        self.run(_cancel_others())
        if not self._ended:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    if others:
        _, left = await asyncio.wait(others, timeout=_PATIENCE)
        if left:  # of a backend in this process; nothing can end it, and nothing waits for it
            log.warning("%d task(s) heed no cancellation and are left behind: %s", len(left), left)
