"""Messages of the dispatcher's tests, spoken over a real transport, with faults or without."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from dispatcher_fakes import FakeBackend, FakeClock, Talk
from http_support import listening

from remote_rl.dispatcher import Dispatcher
from remote_rl.messages import ConnectionLost, Message, Transport
from remote_rl.server.app import application
from remote_rl.testing.faults import Faults
from remote_rl.transports.http import HttpTransport
from remote_rl.transports.inprocess import InProcessTransport

PATIENCE = 60.0
#: one message in three is lost somewhere, every second one comes twice
STRONG = Faults(
    seed=2,
    lose_request=0.08,
    lose_response=0.08,
    cut_request=0.08,
    cut_response=0.08,
    duplicate=0.5,
    delay=0.1,
    delay_seconds=0.002,
    reorder=0.1,
    reorder_seconds=0.01,
)
LINES = ("inprocess", "inprocess faulty", "http", "http faulty")


class Line:
    """Stands where a Talk expects its dispatcher: sends each message until it is answered."""

    def __init__(self, transport: Transport, instance_id: str) -> None:
        self.instance_id = instance_id
        self.transport = transport

    async def handle(self, message: Message) -> Any:
        while True:
            try:
                return await self.transport.call(message, PATIENCE)
            except ConnectionLost:
                continue


@contextlib.asynccontextmanager
async def talking(line: str, client: str | None = "a", **options: Any) -> AsyncIterator[Any]:
    """A Talk with a started dispatcher over this line, one driver attached."""
    backend, clock = FakeBackend(), FakeClock()
    dispatcher = Dispatcher(backend, clock=clock, **options)
    await dispatcher.start()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(dispatcher.close)
        transport: Transport = InProcessTransport(dispatcher)
        if line.startswith("http"):
            url, _ = await stack.enter_async_context(listening(application(dispatcher)))
            transport = HttpTransport(url)
        if line.endswith("faulty"):
            transport = STRONG.wrap(transport)
        stack.push_async_callback(transport.close)
        talk = Talk(Line(transport, dispatcher.instance_id), backend, clock)
        if client is not None:
            await talk.grant(client)
        backend.calls.clear()
        yield talk


Test = Callable[..., Awaitable[None]]


def over_each_line(test: Test) -> Callable[..., None]:
    """Runs an async test over each transport, with faults and without; the first argument is the
    name of the line."""

    @pytest.mark.parametrize("line", LINES)
    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        async def whole() -> None:
            await asyncio.wait_for(test(**arguments), PATIENCE)

        asyncio.run(whole())

    return run
