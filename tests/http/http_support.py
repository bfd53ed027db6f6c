"""A server in the test's own event loop, a handler that answers as told, and raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import aiohttp
from aiohttp import web

from remote_rl.messages import Message, Renew, Renewed
from remote_rl.server.app import application, runner
from remote_rl.transports.bodies import FRAME_TYPE
from remote_rl.transports.http import HttpTransport
from remote_rl.wire import encode

LEASED = {"client_id": "c", "instance_id": "i"}
RENEW = Renew(**LEASED)
LONG = 30.0


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an async test in a loop of its own; it fails where it leaves a task behind."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        async def whole() -> None:
            await asyncio.wait_for(test(*arguments, **named), 60)

        asyncio.run(whole())

    return run


class Scripted:
    """Answers each message by `answer`, a value, an exception, or a coroutine function."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = Renewed(lease_seconds=60) if answer is None else answer
        self.heard: list[Message] = []
        self.reached = asyncio.Event()

    async def handle(self, message: Message) -> Any:
        self.heard.append(message)
        self.reached.set()
        if isinstance(self.answer, BaseException):
            raise self.answer
        if callable(self.answer):
            return await self.answer(message)
        return self.answer


@contextlib.asynccontextmanager
async def listening(app: web.Application, **tls: Any) -> AsyncIterator[tuple[str, Any]]:
    """The address of a served application, and its runner."""
    app_runner = runner(app, shutdown_seconds=1.0)
    await app_runner.setup()
    try:
        await web.TCPSite(app_runner, "127.0.0.1", 0, **tls).start()
        scheme = "https" if tls else "http"
        yield f"{scheme}://127.0.0.1:{app_runner.addresses[0][1]}", app_runner
    finally:
        await app_runner.cleanup()


@contextlib.asynccontextmanager
async def speaking(url: str, **options: Any) -> AsyncIterator[HttpTransport]:
    """A transport that is closed at the end."""
    transport = HttpTransport(url, **options)
    try:
        yield transport
    finally:
        await transport.close()


@contextlib.asynccontextmanager
async def pair(handler: Any, **options: Any) -> AsyncIterator[HttpTransport]:
    """A transport to a server of `handler`; `token` is both sides', `max_body` the server's."""
    async with (
        listening(application(handler, **options)) as (url, _),
        speaking(url, token=options.get("token")) as transport,
    ):
        yield transport


@contextlib.asynccontextmanager
async def raw_server(
    respond: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """The address of a socket that answers each connection by `respond` and then closes it."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(ConnectionError):
            await respond(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}"
    finally:
        server.close()
        await asyncio.gather(*tasks)
        await server.wait_closed()


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """The head of a request and its whole body, where it says how long it is."""
    head = await reader.readuntil(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            await reader.readexactly(int(line.split(b":")[1]))
    return head


def response(body: bytes, *, status: str = "200 OK", kind: str = FRAME_TYPE) -> bytes:
    """A whole HTTP response."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def frame_bytes(value: Any) -> bytes:
    """A value's whole frame."""
    return b"".join(encode(value).parts)


async def post(
    url: str, body: Any = None, path: str = "/v1/renew", **headers: str
) -> tuple[int, bytes, Any]:
    """Status, body and headers of a request made without the transport."""
    sent = {"Content-Type": FRAME_TYPE, **{key.replace("_", "-"): headers[key] for key in headers}}
    async with (
        aiohttp.ClientSession(auto_decompress=False) as session,
        session.post(
            url + path, data=frame_bytes(RENEW) if body is None else body, headers=sent
        ) as answer,
    ):
        return answer.status, await answer.read(), answer.headers
