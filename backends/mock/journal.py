"""Mock backend: call log, faults and latency around every operation (imports config and the
contract)."""

from __future__ import annotations

import asyncio
import os
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import attrs

from remote_rl.errors import RunLostError
from remote_rl.protocol import OperationContext
from remote_rl.types.fields import KIND, SCHEDULING

from .config import EXIT, HANG, MockConfig

#: records that the log keeps, the latest
LOG_LENGTH = 10_000
#: of a process that a fault ends
EXIT_CODE = 70


@attrs.frozen(kw_only=True)
class Call:
    """One line of the call log: an operation began, ended, or failed.

    request_id: of the operation, "" where it has none. scheduling: the request's SCHEDULING
    fields, those of its SamplingParams included, by name. request: the whole of it, in the
    `call_log` of the caller only; the backend's own log would keep every batch in memory.
    """

    operation: str
    event: Literal["started", "ended", "failed"]
    request_id: str
    scheduling: Mapping[str, Any]
    request: Any = attrs.field(default=None, eq=False, repr=False)


class Journal:
    """Runs operations with what the options ask for around them, and remembers them."""

    def __init__(self, config: MockConfig) -> None:
        self._config = config
        self._counts: Counter[str] = Counter()
        self._calls: deque[Call] = deque(maxlen=LOG_LENGTH)
        self._killed = asyncio.Event()

    @property
    def calls(self) -> tuple[Call, ...]:
        """The log, oldest first."""
        return tuple(self._calls)

    def kill(self) -> None:
        """Ends what hangs."""
        self._killed.set()

    @asynccontextmanager
    async def operation(
        self, name: str, request: Any, context: OperationContext
    ) -> AsyncIterator[None]:
        """Around one operation: log, faults, latency (which an abort cuts short)."""
        self._counts[name] += 1
        count = self._counts[name]
        scheduling = dict(scheduling_fields(request))

        def log(event: Literal["started", "ended", "failed"]) -> None:
            call = Call(
                operation=name,
                event=event,
                request_id=context.request_id,
                scheduling=scheduling,
            )
            self._calls.append(call)
            if self._config.call_log is not None:
                self._config.call_log.append(attrs.evolve(call, request=request))

        log("started")
        try:
            await self._fault(name, count, "before")
            await pause(self._config.seconds(name), context)
            yield
            await self._fault(name, count, "after")
        except BaseException:
            log("failed")
            raise
        log("ended")

    async def _fault(self, name: str, count: int, when: str) -> None:
        for fault in self._config.faults:
            if (fault.operation, fault.call, fault.when) != (name, count, when):
                continue
            if fault.error == HANG:
                await self._killed.wait()
                raise RunLostError(f"the mock backend was killed while its {name} hung")
            if fault.error == EXIT:
                os._exit(EXIT_CODE)
            raise fault.exception()


async def pause(seconds: float, context: OperationContext) -> None:
    """Waits on the dispatcher's clock, until an abort at most."""
    if seconds <= 0:
        return
    waits = [
        asyncio.ensure_future(context.sleep(seconds)),
        asyncio.ensure_future(context.abort_signal.wait()),
    ]
    await first_of(waits)


async def first_of(waits: Sequence[asyncio.Future[Any]], timeout: float | None = None) -> None:
    """Until one of them is done; the others are cancelled."""
    try:
        await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def scheduling_fields(request: Any) -> Iterator[tuple[str, Any]]:
    """Name and value of every SCHEDULING field of a request and of the classes inside it."""
    if not attrs.has(type(request)):
        return
    for field in attrs.fields(type(request)):
        value = getattr(request, field.name)
        if field.metadata.get(KIND) == SCHEDULING[KIND]:
            yield field.name, value
        else:
            yield from scheduling_fields(value)
