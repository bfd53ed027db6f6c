"""Transport: how a message becomes an HTTP body, on both sides (imports wire and messages only)."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from ..errors import InvalidRequestError
from ..messages import MESSAGES, Message
from ..wire import Frame
from .buffer import GrowingBuffer

FRAME_TYPE = "application/x-remote-rl-frame"
ROUTE_PREFIX = "/v1/"
#: bytes that are handed to the socket, and asked of it, at once
CHUNK_BYTES = 1 << 20
#: a frame up to this size is sent as one piece, in one write with its headers
SMALL_BYTES = 1 << 16


class Received(Protocol):
    """The part of aiohttp's StreamReader that is read here."""

    def iter_chunks(self) -> AsyncIterator[tuple[bytes, bool]]: ...
    def at_eof(self) -> bool: ...
    def is_eof(self) -> bool: ...
    def read_nowait(self, n: int = -1) -> bytes: ...


def route_of(message_class: type) -> str:
    """The path of a message: `/v1/` and its class name in snake case."""
    path = _PATHS.get(message_class)
    if path is None:
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", message_class.__name__).lower()
        path = _PATHS[message_class] = ROUTE_PREFIX + name
    return path


_PATHS: dict[type, str] = {}


#: path -> class, of every message that a client sends
ROUTES = {route_of(each): each for each in MESSAGES if issubclass(each, Message)}


def nothing_moved(count: int) -> None:
    """The `moved` of whoever does not watch the bytes."""


async def pieces(
    frame: Frame, moved: Callable[[int], None] = nothing_moved
) -> AsyncIterator[bytes | memoryview]:
    """The frame's bytes; `moved` hears of each piece once the next one is wanted."""
    for piece in frame.chunks(CHUNK_BYTES):
        yield piece
        moved(len(piece))


def arrived(content: Received, limit: int | None = None) -> memoryview | None:
    """A body that has come whole with its head, as small ones do; None where it must be waited for.

    Raises `InvalidRequestError` where it has more than `limit` bytes.
    """
    if not content.is_eof():
        return None
    body = content.read_nowait()
    if limit is not None and len(body) > limit:
        raise too_large(limit)
    return memoryview(body)


async def receive(
    content: Received, limit: int | None = None, moved: Callable[[int], None] = nothing_moved
) -> memoryview:
    """A whole body, in memory that grows with the bytes received, never by those announced.

    Raises `InvalidRequestError` as soon as more than `limit` bytes have come.
    """
    body = GrowingBuffer()
    async for piece, _ in content.iter_chunks():
        if not piece and content.at_eof():
            break  # aiohttp's reader of bodies of length 0 never ends by itself
        if limit is not None and body.size + len(piece) > limit:
            raise too_large(limit)
        body.append(piece)
        moved(len(piece))
    return body.contents()


def too_large(limit: int) -> InvalidRequestError:
    """The refusal of a body of more than `limit` bytes."""
    return InvalidRequestError(
        f"the message is larger than the {limit} bytes that the server takes; send the batch in "
        "pieces (Batch.split), a push in smaller ones (part_bytes=), or start the server with a "
        "larger --max-body",
        limit=limit,
    )
