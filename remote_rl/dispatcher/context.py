"""Dispatcher: what a running backend method sees of it (imports the contract, clock, record)."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, TypeVar

import attrs

from ..errors import BackendError
from ..messages import ProgressReport
from ..types.generation import Sample
from .clock import Clock
from .record import Record

T = TypeVar("T")


@attrs.define(eq=False)
class RunningContext:
    """Implements `protocol.OperationContext` for one record."""

    record: Record
    clock: Clock
    executor: Executor
    loop: asyncio.AbstractEventLoop
    wake_client: Callable[[], None]
    on_sample: Callable[[Sample], None]
    on_loss: Callable[[str], None]
    version: int
    next_version: int
    seed: int = 0
    counters: dict[int, int] | None = None
    _directory: Path | None = None
    thread_of_loop: int = attrs.field(factory=threading.get_ident)

    @property
    def request_id(self) -> str:
        """Names this operation."""
        return self.record.request_id

    @property
    def directory(self) -> Path:
        """Where save and export write and load reads."""
        if self._directory is None:
            raise BackendError(f"{self.record.operation.name} has no directory")
        return self._directory

    @property
    def cancelled(self) -> bool:
        """Whether it should end early."""
        return self.record.told_to_end

    @property
    def abort_signal(self) -> asyncio.Event:
        """Set when `cancelled` becomes true."""
        return self.record.abort_signal

    def progress(self, done: float, total: float | None = None, what: str = "") -> None:
        """A sign of life, from any thread."""
        key = self.record.key
        self._on_loop(
            self._show,
            ProgressReport(stream=key[0], number=key[1], done=done, total=total, what=what),
        )

    def _show(self, report: ProgressReport) -> None:
        record = self.record
        self._lives()
        record.doing = report.what or record.doing
        record.progress, record.progress_sent = report, False
        self.wake_client()

    def _lives(self) -> None:
        # what was told to end has one stall_timeout for it, whatever it goes on to report
        if not self.cancelled:
            self.record.last_sign = self.clock.now()

    def emit(self, sample: Sample) -> None:
        """One finished sample, from any thread."""
        self._on_loop(self._take, sample)

    def _take(self, sample: Sample) -> None:
        if self.record.done:
            return
        self._lives()
        self.record.add_sample(sample)
        self.on_sample(sample)
        self.wake_client()

    def lost(self, reason: str) -> None:
        """The engine has died; at any time, from any thread."""
        self._on_loop(self.on_loss, reason)

    def _on_loop(self, function: Callable[..., None], argument: Any) -> None:
        # records and signals belong to the loop; a thread's report waits for its turn there
        if threading.get_ident() == self.thread_of_loop:
            function(argument)
        else:
            try:
                self.loop.call_soon_threadsafe(function, argument)
            except RuntimeError:
                if not self.loop.is_closed():
                    raise
                # a thread that outlived its run: nobody is left to hear of it

    async def thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Runs a blocking function off the loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.executor, functools.partial(function, *arguments))

    async def sleep(self, seconds: float) -> None:
        """Waits on the dispatcher's clock."""
        await self.clock.sleep(seconds)
