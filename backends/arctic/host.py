"""Arctic backend: the process that holds the engine; its life hangs on the backend's (imports
channel, child's facts, leftovers and the contract)."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import attrs

from remote_rl.errors import BackendError, as_remote_error
from remote_rl.ops import OPERATIONS

from .channel import Channel
from .child import Facts
from .leftovers import Owner, end_processes, end_session, remove_segments

T = TypeVar("T")

#: how long operations that still run may take to end once it closes
_CANCEL_SECONDS = 2.0


@attrs.define(eq=False)
class HostContext:
    """Implements `protocol.OperationContext` on the engine's side, for one operation."""

    number: int
    facts: Facts
    send: Callable[[Any], None]
    reports: Reports
    abort_signal: asyncio.Event = attrs.field(factory=asyncio.Event)

    @property
    def request_id(self) -> str:
        """Names this operation."""
        return self.facts.request_id

    @property
    def version(self) -> int:
        """Of the trainer's weights as it starts."""
        return self.facts.version

    @property
    def next_version(self) -> int:
        """To give the weights if it changes them."""
        return self.facts.next_version

    @property
    def seed(self) -> int:
        """For generate."""
        return self.facts.seed

    @property
    def directory(self) -> Path:
        """Where save and export write and load reads."""
        if self.facts.directory is None:
            raise BackendError(f"{self.facts.operation} has no directory")
        return self.facts.directory

    @property
    def cancelled(self) -> bool:
        """Whether it should end early."""
        return self.abort_signal.is_set()

    def progress(self, done: float, total: float | None = None, what: str = "") -> None:
        """A sign of life, from any thread."""
        self.send(("progress", self.number, done, total, what))

    def emit(self, sample: Any) -> None:
        """One finished sample."""
        self.send(("sample", self.number, sample))

    def lost(self, reason: str) -> None:
        """Ends this process, which the backend hears, and why."""
        self.reports.lost(reason)

    async def thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Runs a blocking function off the loop."""
        return await asyncio.get_running_loop().run_in_executor(None, function, *arguments)

    async def sleep(self, seconds: float) -> None:
        """Waits."""
        await asyncio.sleep(seconds)


class Reports:
    """What an engine says that belongs to no operation. workers: their processes, all of them, each
    time they change; segments of shared memory are named after this process."""

    def __init__(self, send: Callable[[Any], None], end: Callable[[], None]) -> None:
        self._send = send
        self._end = end
        self.processes: tuple[Owner, ...] = ()

    def serving(self, version: int | None, label: int | str | None) -> None:
        """The sampler serves this from now on."""
        self._send(("serving", version, label))

    def workers(self, processes: tuple[Owner, ...]) -> None:
        """These processes must not outlive this one."""
        self.processes = processes
        self._send(("workers", processes))

    def lost(self, reason: str) -> None:
        """There is no going on: ends this process, and with it all that it has started."""
        self._send(("lost", reason))
        self._end()


class Records(logging.Handler):
    """Passes what is logged here on to the backend's process, whose user may want to see it."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        """One record, as text."""
        self._send(("log", record.name, record.levelno, self.format(record)))


class Host:
    """Takes operations from the channel and runs them on the engine."""

    def __init__(self, end: socket.socket, directory: Path) -> None:
        self._end = end
        self._directory = directory
        self._over = asyncio.Event()
        #: held by whoever ends the process: what is ended with it may look like another reason
        self._ending = threading.Lock()
        self._engine: Any = None
        self._broken: Exception | None = None
        self._contexts: dict[int, HostContext] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until the backend says that it is over."""
        self._channel = Channel(
            self._end,
            asyncio.get_running_loop(),
            self._receive,
            lambda how: None,
            at_once=self._orphaned,
        )
        self._reports = Reports(self._channel.send, self._exit)
        logger = logging.getLogger("remote_rl")
        logger.addHandler(Records(self._channel.send))
        logger.setLevel(logging.INFO)
        self._channel.start()
        await self._over.wait()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CANCEL_SECONDS)
        if self._engine is not None:
            await self._engine.close()
        if not self._ending.acquire(blocking=False):
            await asyncio.Event().wait()  # another thread is at it, and ends the process
        self._clean()

    def _exit(self) -> None:
        if self._ending.acquire(blocking=False):
            self._channel.close()
            os._exit(1)

    def _orphaned(self) -> None:
        """The backend's process is gone. Nothing may be left, and nobody is there to be told."""
        if self._ending.acquire(blocking=False):
            self._clean()
            os._exit(1)

    def _clean(self) -> None:
        end_session(os.getpid())
        end_processes(self._reports.processes)
        remove_segments(os.getpid())
        shutil.rmtree(self._directory, ignore_errors=True)

    def _receive(self, message: tuple[Any, ...]) -> None:
        kind, *rest = message
        getattr(self, f"_take_{kind}")(*rest)

    def _take_make(self, factory: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        try:
            self._engine = factory(*arguments, self._directory, self._reports)
        except Exception as error:  # noqa: BLE001 - whoever calls an operation is told
            self._broken = as_remote_error(error)

    def _take_call(self, number: int, facts: Facts, request: Any) -> None:
        context = HostContext(number, facts, self._channel.send, self._reports)
        self._contexts[number] = context
        task = asyncio.create_task(self._run(number, context, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _take_abort(self, number: int) -> None:
        context = self._contexts.get(number)
        if context is not None:
            context.abort_signal.set()

    def _take_ping(self) -> None:
        self._channel.send(("pong",))

    def _take_close(self) -> None:
        self._over.set()

    async def _run(self, number: int, context: HostContext, request: Any) -> None:
        try:
            if self._broken is not None:
                raise self._broken
            result = await self._method(context.facts.operation)(request, context)
        except Exception as error:  # noqa: BLE001 - whatever it was, its caller is told
            self._channel.send(("failed", number, as_remote_error(error)))
        else:
            self._channel.send(("done", number, result))
        finally:
            del self._contexts[number]

    def _method(self, operation: str) -> Any:
        if operation == "start":
            return self._engine.start
        face = OPERATIONS[operation].face
        return getattr(
            self._engine if face == "backend" else getattr(self._engine, face), operation
        )


def main() -> None:
    """Serves the socket whose number is the first argument, with the directory that is the second
    for its files."""
    end = socket.socket(fileno=int(sys.argv[1]))
    end.set_inheritable(False)
    asyncio.run(Host(end, Path(sys.argv[2])).run())
    # what an engine's libraries left in threads must not keep the process
    os._exit(0)


if __name__ == "__main__":
    main()
