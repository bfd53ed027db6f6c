"""Server: the HTTP application over a dispatcher (imports bodies, wire, the contract; aiohttp).

POST /v1/MESSAGE takes a frame and answers with one; GET /healthz says that the server lives.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
from typing import Any, Protocol

from aiohttp import web

from ..errors import (
    AuthenticationError,
    InvalidRequestError,
    ProtocolError,
    RemoteRLError,
    as_remote_error,
)
from ..messages import Message
from ..transports.bodies import (
    CHUNK_BYTES,
    FRAME_TYPE,
    ROUTE_PREFIX,
    ROUTES,
    SMALL_BYTES,
    pieces,
    receive,
    too_large,
)
from ..wire import Frame, decode, encode
from .status import status_of

DEFAULT_MAX_BODY = 4 << 30
#: decoding validates every array; above this size that happens off the loop
DECODE_ON_LOOP_BYTES = 4 << 20
log = logging.getLogger("remote_rl.server")


class Handler(Protocol):
    """What is served: `remote_rl.dispatcher.Dispatcher`, or whatever answers messages."""

    async def handle(self, message: Message) -> Any:
        """The reply. Cancelled where the client hangs up: nobody waits for this answer any more,
        and what the message asked for goes on."""


def application(
    handler: Handler, *, token: str | None = None, max_body: int = DEFAULT_MAX_BODY
) -> web.Application:
    """The application; without a token it answers only to loopback names in `Host`.

    token: what `Authorization: Bearer` must hold. max_body: bytes of the largest message.
    """
    messages = _Messages(handler, token, max_body)
    app = web.Application()
    app.router.add_route(
        "*", ROUTE_PREFIX + "{message}", messages.answer, expect_handler=messages.expected
    )
    app.router.add_get("/healthz", _health)
    return app


def runner(app: web.Application, shutdown_seconds: float = 5.0) -> web.AppRunner:
    """The application's runner. A client that hangs up cancels its `handle`; bodies are never
    decompressed, so that no small one becomes a large one."""
    return web.AppRunner(
        app,
        handler_cancellation=True,
        auto_decompress=False,
        access_log=logging.getLogger("remote_rl.server.access"),
        shutdown_timeout=shutdown_seconds,
        read_bufsize=CHUNK_BYTES,
    )


async def _health(_: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


class _Refusal(Exception):
    """An error with a status of its own."""

    def __init__(self, status: int, error: RemoteRLError, **headers: str) -> None:
        super().__init__(error.message)
        self.status, self.error = status, error
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class _Messages:
    def __init__(self, handler: Handler, token: str | None, max_body: int) -> None:
        self._handler = handler
        self._token = None if token is None else token.encode()
        self._max_body = max_body

    async def expected(self, request: web.Request) -> web.StreamResponse | None:
        """Answers `Expect: 100-continue`: a body that would be refused is not asked for."""
        try:
            self._check(request)
        except _Refusal as refusal:
            return _refuse(request, refusal)
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # so that aiohttp sees the answer itself as not yet begun
        return None

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """One message to its reply, or to the frame of an error."""
        try:
            message_class = self._check(request)
            body = await self._body(request)
            message = await _decoded(body, message_class)
            del body
            frame = encode(await self._handler.handle(message))
        except _Refusal as refusal:
            return _refuse(request, refusal)
        except RemoteRLError as error:
            return _refuse(request, _Refusal(status_of(error), error))
        except (ConnectionError, asyncio.IncompleteReadError):
            raise  # the client is gone, there is nobody to answer
        except Exception as error:
            log.exception("%s failed", request.path)
            return _refuse(request, _Refusal(500, as_remote_error(error)))
        return await _send(request, frame)

    def _check(self, request: web.Request) -> type[Message]:
        """Everything that can be refused before the body is read; the message's class."""
        self._authorise(request)
        message_class = ROUTES.get(request.path)
        if message_class is None:
            raise _Refusal(
                404,
                ProtocolError(
                    f"there is no message {request.path!r}; this server takes {', '.join(ROUTES)}"
                ),
            )
        if request.method != "POST":
            raise _Refusal(
                405, ProtocolError(f"{request.path} takes POST, not {request.method}"), Allow="POST"
            )
        if (
            request.content_type != FRAME_TYPE
            or request.headers.get("Content-Encoding", "identity").lower() != "identity"
        ):
            raise _Refusal(
                415,
                ProtocolError(
                    f"a message has the content type {FRAME_TYPE} and no content encoding, not "
                    f"{request.content_type}"
                ),
            )
        if (request.content_length or 0) > self._max_body:
            raise _Refusal(413, too_large(self._max_body))
        return message_class

    def _authorise(self, request: web.Request) -> None:
        if self._token is None:
            if not _names_loopback(request.host):
                raise _Refusal(
                    403,
                    AuthenticationError(
                        f"a server without a token answers to loopback names only, not to "
                        f"{request.host!r}"
                    ),
                )
            return
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        presented = given.strip().encode("utf-8", "surrogateescape")
        right = hmac.compare_digest(presented, self._token)
        if kind.lower() != "bearer" or not right:
            problem = "is wrong" if presented else "is missing"
            raise _Refusal(
                401,
                AuthenticationError(
                    f"the token {problem}; pass token= or set REMOTE_RL_TOKEN to what the "
                    "server's --token-file holds"
                ),
                WWW_Authenticate="Bearer",
            )

    async def _body(self, request: web.Request) -> memoryview:
        try:
            return await receive(request.content, self._max_body)
        except InvalidRequestError as error:
            raise _Refusal(413, error) from error


def _names_loopback(host: str) -> bool:
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    name = name.strip("[]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


async def _decoded(body: memoryview, message_class: type[Message]) -> Message:
    if len(body) > DECODE_ON_LOOP_BYTES:
        message = await asyncio.to_thread(decode, body)
    else:
        message = decode(body)
    if type(message) is not message_class:
        raise ProtocolError(
            f"the frame holds a {type(message).__name__}, its address asks for a "
            f"{message_class.__name__}"
        )
    return message


def _refuse(request: web.Request, refusal: _Refusal) -> web.Response:
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


async def _send(request: web.Request, frame: Frame) -> web.StreamResponse:
    if frame.nbytes <= SMALL_BYTES:
        return web.Response(body=b"".join(frame.parts), content_type=FRAME_TYPE)
    response = web.StreamResponse()
    response.content_type = FRAME_TYPE
    response.content_length = frame.nbytes
    await response.prepare(request)
    async for piece in pieces(frame):
        await response.write(piece)
    await response.write_eof()
    return response
