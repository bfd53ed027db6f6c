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
        return self.record.abort_signal.is_set()

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
        record.last_sign = self.clock.now()
        record.doing = report.what or record.doing
        record.progress, record.progress_sent = report, False
        self.wake_client()

    def emit(self, sample: Sample) -> None:
        """One finished sample, from any thread."""
        self._on_loop(self._take, sample)

    def _take(self, sample: Sample) -> None:
        self.record.last_sign = self.clock.now()
        self.record.samples.append(sample)
        self.wake_client()

    def _on_loop(self, function: Callable[..., None], argument: Any) -> None:
        # records and signals belong to the loop; a thread's report waits for its turn there
        if threading.get_ident() == self.thread_of_loop:
            function(argument)
        else:
            self.loop.call_soon_threadsafe(function, argument)

    async def thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Runs a blocking function off the loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.executor, functools.partial(function, *arguments))

    async def sleep(self, seconds: float) -> None:
        """Waits on the dispatcher's clock."""
        await self.clock.sleep(seconds)
