"""Server: the HTTP application over a dispatcher (imports bodies, wire, the contract; aiohttp).

POST /v1/MESSAGE takes a frame and answers with one; GET /healthz says whether the run lives, GET
/metrics what it does.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from ..errors import InvalidRequestError, ProtocolError, RemoteRLError, as_remote_error
from ..messages import Message
from ..transports.bodies import (
    CHUNK_BYTES,
    FRAME_TYPE,
    ROUTE_PREFIX,
    ROUTES,
    SMALL_BYTES,
    arrived,
    pieces,
    receive,
    too_large,
)
from ..wire import Frame, decode, encode, header_bytes
from .access import Access, AccessLines, Refusal
from .idle import Idle
from .memory import Trimmer
from .metrics import Traffic
from .pages import Pages
from .patience import NothingMoved, Sending
from .replies import reply_frame
from .status import status_of

DEFAULT_MAX_BODY = 4 << 30
DEFAULT_IO_TIMEOUT = 60.0
#: decoding looks at every number once (0.1 ms for a MB, and 10 ms for one of header); above these
#: sizes that happens off the loop, and going there and back takes as long as 1 MB
DECODE_ON_LOOP_BYTES = 32 << 20
HEADER_ON_LOOP_BYTES = 256 << 10
#: seconds by which the timer of a body that doesn't move may be late
_TIMER_SLACK = 0.05
#: aiohttp's own end of a connection without a request; `Idle` comes first, and cuts what hangs
_KEEPALIVE_SECONDS = 86400.0
log = logging.getLogger("remote_rl.server")
_http_log = logging.getLogger("remote_rl.server.http")


class Handler(Protocol):
    """What is served: `remote_rl.dispatcher.Dispatcher`, or whatever answers messages."""

    async def handle(self, message: Message) -> Any:
        """The reply. Cancelled where the client hangs up: nobody waits for this answer any more,
        and what the message asked for goes on."""


def _without_the_request(record: logging.LogRecord) -> bool:
    """What can't be parsed is logged without its bytes: a token may be among them."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.msg, record.args = "%s: it is no HTTP (%s)", (record.getMessage(), error.code)
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.exc_info = record.exc_text = None
    return True


_http_log.addFilter(_without_the_request)
_TRAFFIC = web.AppKey("traffic", Traffic)
_IDLE = web.AppKey("idle", Idle)


def application(
    handler: Handler,
    *,
    token: str | None = None,
    max_body: int = DEFAULT_MAX_BODY,
    io_timeout: float = DEFAULT_IO_TIMEOUT,
) -> web.Application:
    """The application; without a token it answers only to loopback names in `Host`.

    token: what `Authorization: Bearer` must hold. max_body: bytes of the largest message.
    io_timeout: seconds after which a body that doesn't move, in either direction, is given up, and
    a connection on which no request is being answered is cut.
    """
    access, traffic = Access(token), Traffic()
    messages = _Messages(handler, access, traffic, max_body, io_timeout)
    pages = Pages(handler, access, traffic)
    idle = Idle(io_timeout)
    app = web.Application(middlewares=[idle.watch])
    app.cleanup_ctx.append(idle.looking)
    app[_TRAFFIC], app[_IDLE] = traffic, idle
    for path in (*ROUTES, ROUTE_PREFIX + "{message}"):  # first what needs no look at a pattern
        app.router.add_route("*", path, messages.answer, expect_handler=messages.expected)
    app.router.add_get("/healthz", pages.health)
    app.router.add_get("/metrics", pages.metrics)
    return app


def runner(app: web.Application, shutdown_seconds: float = 5.0) -> web.AppRunner:
    """The application's runner. A client that hangs up cancels its `handle`; bodies are never
    decompressed, so that no small one becomes a large one."""
    app_runner = web.AppRunner(
        app,
        handler_cancellation=True,
        auto_decompress=False,
        logger=_http_log,
        access_log=logging.getLogger("remote_rl.server.access"),
        access_log_class=AccessLines,
        keepalive_timeout=_KEEPALIVE_SECONDS,
        shutdown_timeout=shutdown_seconds,
        read_bufsize=CHUNK_BYTES,
    )

    def connections() -> list[web.RequestHandler]:
        return [] if app_runner.server is None else app_runner.server.connections

    app[_IDLE].connections = connections
    app[_TRAFFIC].connections = lambda: len(connections())
    return app_runner


class _Messages:
    def __init__(
        self,
        handler: Handler,
        access: Access,
        traffic: Traffic,
        max_body: int,
        io_timeout: float,
    ) -> None:
        self._handler = handler
        self._access = access
        self._traffic = traffic
        self._max_body = max_body
        self._io_timeout = io_timeout
        self._trimmer = Trimmer()

    async def expected(self, request: web.Request) -> web.StreamResponse | None:
        """Answers `Expect: 100-continue`: a body that would be refused is not asked for."""
        try:
            self._check(request)
        except Refusal as refusal:
            return _refuse(request, refusal)
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # so that aiohttp sees the answer itself as not yet begun
        return None

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """One message to its reply, or to the frame of an error."""
        status = "closed"
        try:
            response = await self._answered(request)
            status = str(response.status)
            self._traffic.sent += response.content_length or 0
            return response
        except NothingMoved as error:
            log.warning(
                "%s given up: %s", request.path, error, extra={"message_path": request.path}
            )
            return _to_nobody(request)
        except (ConnectionError, asyncio.IncompleteReadError):
            return _to_nobody(request)
        finally:
            name = request.path.removeprefix(ROUTE_PREFIX) if request.path in ROUTES else "other"
            self._traffic.requests[name, status] += 1

    async def _answered(self, request: web.Request) -> web.StreamResponse:
        try:
            message_class = self._check(request)
            body = self._arrived(request)
            if body is None:
                body = await self._body(request)
            message = await _decoded(body, message_class)
            large = len(body) > SMALL_BYTES
            del body
            frame = reply_frame(await self._handler.handle(message))
            if large:  # it is held until the loop's next turn: its memory goes after the answer
                asyncio.get_running_loop().call_soon(_let_go, message)
        except Refusal as refusal:
            return _refuse(request, refusal)
        except RemoteRLError as error:
            return _refuse(request, Refusal(status_of(error), error))
        except Exception as error:
            if _is_gone(request) and isinstance(
                error, (ConnectionError, asyncio.IncompleteReadError)
            ):
                raise  # there is nobody to answer
            log.exception("%s failed", request.path)
            return _refuse(request, Refusal(500, as_remote_error(error)))
        return await self._send(request, frame)

    def _check(self, request: web.Request) -> type[Message]:
        """Everything that can be refused before the body is read; the message's class."""
        self._access.check(request)
        message_class = ROUTES.get(request.path)
        if message_class is None:
            raise Refusal(
                404,
                ProtocolError(
                    f"there is no message {request.path!r}; this server takes {', '.join(ROUTES)}"
                ),
            )
        if request.method != "POST":
            raise Refusal(
                405, ProtocolError(f"{request.path} takes POST, not {request.method}"), Allow="POST"
            )
        headers = request.headers
        if (
            # as it is; parsing it takes longer
            (headers.get("Content-Type") != FRAME_TYPE and request.content_type != FRAME_TYPE)
            or headers.get("Content-Encoding", "identity").lower() != "identity"
        ):
            raise Refusal(
                415,
                ProtocolError(
                    f"a message has the content type {FRAME_TYPE} and no content encoding, not "
                    f"{request.content_type}"
                ),
            )
        if (request.content_length or 0) > self._max_body:
            raise Refusal(413, too_large(self._max_body))
        return message_class

    def _arrived(self, request: web.Request) -> memoryview | None:
        try:
            body = arrived(request.content, self._max_body)
        except InvalidRequestError as error:
            raise Refusal(413, error) from error
        if body is not None:
            self._traffic.received += len(body)
            self._trimmer.moved(len(body))
        return body

    async def _body(self, request: web.Request) -> memoryview:
        now = asyncio.get_running_loop().time
        # not every piece sets the timer anew, so that it may ring this much late, never early
        slack = min(_TIMER_SLACK, 0.05 * self._io_timeout)
        since = now()

        def moved(count: int) -> None:
            nonlocal since
            self._traffic.received += count
            moment = now()
            if moment - since >= slack and not patience.expired():
                since = moment
                patience.reschedule(moment + self._io_timeout + slack)

        try:
            async with asyncio.timeout(self._io_timeout + slack) as patience:
                body = await receive(request.content, self._max_body, moved)
            self._trimmer.moved(len(body))
            return body
        except InvalidRequestError as error:
            raise Refusal(413, error) from error
        except TimeoutError as error:
            if request.transport is not None:
                request.transport.abort()
            raise NothingMoved(f"the client sent nothing for {self._io_timeout:g} s") from error

    async def _send(self, request: web.Request, frame: Frame) -> web.StreamResponse:
        if frame.nbytes <= SMALL_BYTES:
            small = web.Response(body=b"".join(frame.parts), content_type=FRAME_TYPE)
            if request.transport is not None and not request.transport.get_write_buffer_size():
                return small  # what the system's own buffer takes at once; nothing can hang
            with Sending(request, self._io_timeout) as sending:
                sending.more(frame.nbytes)
                await small.prepare(request)
                await small.write_eof()
            return small
        response = web.StreamResponse()
        response.content_type = FRAME_TYPE
        response.content_length = frame.nbytes
        with Sending(request, self._io_timeout) as sending:
            await response.prepare(request)
            async for piece in pieces(frame):
                sending.more(len(piece))
                await response.write(piece)
            await response.write_eof()
        self._trimmer.moved(frame.nbytes)
        return response


async def _decoded(body: memoryview, message_class: type[Message]) -> Message:
    if len(body) > HEADER_ON_LOOP_BYTES and (
        len(body) > DECODE_ON_LOOP_BYTES or header_bytes(body) > HEADER_ON_LOOP_BYTES
    ):
        message = await asyncio.to_thread(decode, body)
    else:
        message = decode(body)
    if type(message) is not message_class:
        raise ProtocolError(
            f"the frame holds a {type(message).__name__}, its address asks for a "
            f"{message_class.__name__}"
        )
    return message


def _let_go(message: Message) -> None:
    """Whoever was told to call this held the message until now."""


def _is_gone(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def _to_nobody(request: web.Request) -> web.StreamResponse:
    """What ends a request whose client is gone or was given up: with the connection cut, aiohttp
    writes nothing, and logs nothing that has been logged."""
    if request.transport is not None:
        request.transport.abort()
    nothing = web.Response(status=408)
    nothing.force_close()
    return nothing


def _refuse(request: web.Request, refusal: Refusal) -> web.Response:
    frame = encode(refusal.error)
    response = web.Response(
        status=refusal.status,
        body=b"".join(frame.parts),
        content_type=FRAME_TYPE,
        headers=refusal.headers,
    )
    if not request.content.is_eof():  # what was announced may never come: nothing can follow it
        response.force_close()
    return response
