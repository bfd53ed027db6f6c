"""Server: from the start of a run that is served to its end, whatever carries its messages
(imports errors, dispatcher, progress_line)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ..dispatcher import Dispatcher
from ..errors import RunLostError
from ..progress_line import ProgressLine

log = logging.getLogger("remote_rl.server")

_STOPPING = (signal.SIGINT, signal.SIGTERM)
_SAME_SIGNAL_SECONDS = 1.0


class Startable(Protocol):
    """A dispatcher, or what stands for one in another process."""

    async def start(self, on_progress: Callable[[str], None]) -> Any: ...
    async def close(self) -> None: ...


async def run_over(
    dispatcher: Dispatcher, stop: asyncio.Event, *, grace: float, lease: float
) -> RunLostError | None:
    """Waits until the operator stops the server or the run is lost, and ends either in order: what
    was lost, None after a stop."""
    stopped = asyncio.ensure_future(stop.wait())
    over = asyncio.ensure_future(dispatcher.lost())
    try:
        await asyncio.wait((stopped, over), return_when=asyncio.FIRST_COMPLETED)
        if not over.done():
            log.info("stopping; what runs may end within %g s", grace)
            await dispatcher.drain(grace)
            return None
        lost = over.result()
        log.error("the run is lost; clients are told for %g s, then the server ends", lease)
        loop = asyncio.get_running_loop()
        end = loop.time() + lease
        while dispatcher.attached and not stop.is_set() and loop.time() < end:
            await asyncio.wait((stopped,), timeout=0.2)
        return lost
    finally:
        stopped.cancel()
        over.cancel()


async def started(run: Startable, name: str, stop: asyncio.Event) -> bool:
    """Starts the run; False where a signal came first, with nothing left behind."""
    line, began = ProgressLine(), time.monotonic()
    doing = ""

    def hear(what: str) -> None:
        nonlocal doing
        doing = f", {what}" if what else ""

    log.info("starting %s", name)
    start = asyncio.ensure_future(run.start(hear))
    stopped = asyncio.ensure_future(stop.wait())
    try:
        while not start.done() and not stopped.done():
            await asyncio.wait((start, stopped), timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
            line.show(f"remote_rl: starting {name}, {time.monotonic() - began:.0f} s{doing}")
        if start.done():
            await start
            return True
        start.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await start
            await run.close()
        return False
    finally:
        stopped.cancel()
        line.clear()


@contextlib.contextmanager
def stop_signals() -> Iterator[asyncio.Event]:
    """An event that SIGINT or SIGTERM sets. Who starts processes often passes a signal on to one
    that has it already, so only a second Ctrl-C some time after the first cuts the stop short."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    first = 0.0

    def release() -> None:
        for number in _STOPPING:
            loop.remove_signal_handler(number)

    def hear(number: signal.Signals) -> None:
        nonlocal first
        if not stop.is_set():
            first = loop.time()
            stop.set()
        elif number is signal.SIGINT and loop.time() - first > _SAME_SIGNAL_SECONDS:
            release()
            signal.raise_signal(number)

    for number in _STOPPING:
        loop.add_signal_handler(number, hear, number)
    try:
        yield stop
    finally:
        release()


def print_line(line: str) -> None:
    """To stdout, at once."""
    print(line, flush=True)
