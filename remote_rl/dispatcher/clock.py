"""Dispatcher: the clocks behind leases, deadlines and stalls, replaceable in tests
(imports asyncio)."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that only grow."""

    def now(self) -> float: ...
    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The monotonic clock, which also counts while the process is stopped by a signal."""

    now = staticmethod(time.monotonic)  # itself, for every operation looks at it several times

    async def sleep(self, seconds: float) -> None:
        """Waits on the running event loop."""
        await asyncio.sleep(seconds)


#: between two looks of a dispatcher that runs; its watch looks twice as often
LONGEST_GAP = 1.0


class AwakeClock:
    """Another clock's time as far as the dispatcher itself was running.

    While its process is stopped or its loop is blocked, the messages of clients and the backend's
    signs of life wait unread, so that time must not end a lease, pass a deadline or make a stall.
    A longer gap between two looks counts as LONGEST_GAP seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._read = clock.now
        self._seen = clock.now()
        self._awake = self._seen

    def now(self) -> float:
        """Seconds since some fixed point, less those in which nobody could look."""
        seen = self._read()
        gap = seen - self._seen
        self._awake += gap if gap < LONGEST_GAP else LONGEST_GAP
        self._seen = seen
        return self._awake

    async def sleep(self, seconds: float) -> None:
        """Waits as the other clock does."""
        await self._clock.sleep(seconds)
