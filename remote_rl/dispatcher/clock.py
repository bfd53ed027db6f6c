"""Dispatcher: the clock behind leases, deadlines and stalls, replaceable in tests
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

    def now(self) -> float:
        """Seconds since some fixed point."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Waits on the running event loop."""
        await asyncio.sleep(seconds)
