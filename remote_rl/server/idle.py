"""Server: connections on which no request is being answered (imports nothing of remote_rl;
aiohttp)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from aiohttp import web

log = logging.getLogger("remote_rl.server")

_LOOKS = 4


class Idle:
    """Cuts a connection on which nothing has been answered for `seconds` and nothing is under way:
    one that sent nothing, one whose request has a head without an end, one that doesn't take a
    small answer, and one that is kept alive for nothing.

    connections: those of the server. All of them are looked at four times in `seconds`, so that
    one is cut after at most 1.25 times as long.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._answering: set[web.RequestHandler] = set()
        self._since: dict[web.RequestHandler, float] = {}
        # aiohttp forgets the transport of a connection that it closes, though its buffer may hold
        # what nobody takes
        self._transports: dict[web.RequestHandler, asyncio.BaseTransport] = {}
        self.connections: Callable[[], Iterable[web.RequestHandler]] = tuple

    @web.middleware
    async def watch(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """While a request is answered its connection is busy, whatever moves on it."""
        connection = request.protocol
        self._answering.add(connection)
        try:
            return await handler(request)
        finally:
            self._answering.discard(connection)
            self._since[connection] = asyncio.get_running_loop().time()

    async def looking(self, app: web.Application) -> AsyncIterator[None]:
        """Looks for as long as the application is up."""
        task = asyncio.create_task(self._look_often(), name="remote_rl idle connections")
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def _look_often(self) -> None:
        while True:
            await asyncio.sleep(self._seconds / _LOOKS)
            self._look(asyncio.get_running_loop().time())

    def _look(self, now: float) -> None:
        open_now = set(self.connections())
        self._since = {one: self._since.get(one, now) for one in open_now}
        for one in open_now:
            if one.transport is not None:
                self._transports[one] = one.transport
        self._transports = {
            one: transport for one, transport in self._transports.items() if one in open_now
        }
        for one, transport in self._transports.items():
            if one not in self._answering and now - self._since[one] >= self._seconds:
                log.debug("cut a connection without a request for %g s", self._seconds)
                transport.abort()  # type: ignore[attr-defined]
