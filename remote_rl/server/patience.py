"""Server: giving up on answers that nobody takes (imports nothing of remote_rl; aiohttp)."""

from __future__ import annotations

import asyncio
from types import TracebackType

from aiohttp import web


class NothingMoved(ConnectionError):
    """A body stood still for too long, and its connection was cut: the client may send the message
    again over another one."""


class Sending:
    """Within it an answer is written. The connection is cut where the client takes nothing for
    `seconds`, which fails the write and ends in `NothingMoved`."""

    def __init__(self, request: web.Request, seconds: float) -> None:
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the client is gone")
        self._transport = transport
        self._seconds = seconds
        self._written = self._taken = 0
        self._gave_up = False
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def more(self, count: int) -> None:
        """So many bytes are about to be written."""
        self._written += count

    def __enter__(self) -> Sending:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        if self._gave_up and error is not None:
            raise NothingMoved(f"the client took nothing for {self._seconds:g} s") from error

    def _look(self) -> None:
        taken = self._written - self._transport.get_write_buffer_size()
        if taken == self._taken:
            self._gave_up = True
            self._transport.abort()
            return
        self._taken = taken
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._look)
