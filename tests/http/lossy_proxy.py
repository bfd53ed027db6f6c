"""A TCP proxy, in a thread of its own, that does to bytes what bad lines do."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import threading
from collections import Counter
from collections.abc import Coroutine, Iterator
from typing import Any

_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
#: seconds until the answer to a replayed request counts as read
_REPLAY_SECONDS = 2.0
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Requests:
    """Finds the whole requests in what a client sends over one connection."""

    def __init__(self) -> None:
        self._bytes = b""

    def add(self, piece: bytes) -> list[bytes]:
        """The requests that `piece` completes."""
        self._bytes += piece
        whole = []
        while (end := self._bytes.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(self._bytes, 0, end)
            size = end + 4 + (int(length[1]) if length else 0)
            if len(self._bytes) < size:
                break
            whole.append(self._bytes[:size])
            self._bytes = self._bytes[size:]
        return whole


class LossyProxy:
    """Relays to `port`, and cuts each connection once it has carried a random number of bytes in
    one direction: in a request, between request and answer, or in an answer.

    most_bytes: before a cut, None never cuts. delay: the probability that a piece of bytes is late
    by up to `delay_seconds`. black_hole: that a connection takes requests, which may even reach the
    server, and gives no answer until it is cut `hole_seconds` later. replay: that a whole request
    is sent to the server a second time, over a connection of its own, at once or up to
    `replay_seconds` later.
    done: how often each was, by "cut", "delay", "black_hole", "replay".
    """

    def __init__(
        self,
        port: int,
        seed: int,
        most_bytes: int | None,
        *,
        delay: float = 0.0,
        delay_seconds: float = 0.01,
        black_hole: float = 0.0,
        hole_seconds: float = 0.1,
        replay: float = 0.0,
        replay_seconds: float = 0.2,
    ) -> None:
        self.done: Counter[str] = Counter()
        self._target = port
        self._random = random.Random(seed)
        self._most_bytes = most_bytes
        self._delay, self._delay_seconds = delay, delay_seconds
        self._black_hole, self._hole_seconds = black_hole, hole_seconds
        self._replay, self._replay_seconds = replay, replay_seconds
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def cuts(self) -> int:
        """Connections that were cut for their number of bytes."""
        return self.done["cut"]

    def _happens(self, kind: str, probability: float) -> bool:
        if probability == 0 or self._random.random() >= probability:
            return False
        self.done[kind] += 1
        return True

    async def _relay(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        budget: int,
        requests: Requests | None,
    ) -> None:
        while piece := await reader.read(min(65536, budget)):
            if self._happens("delay", self._delay):
                await asyncio.sleep(self._random.uniform(0, self._delay_seconds))
            writer.write(piece)
            await writer.drain()
            for request in requests.add(piece) if requests is not None else ():
                if self._happens("replay", self._replay):
                    self._begin(self._send_again(request))
            budget -= len(piece)
            if budget <= 0:
                self.done["cut"] += 1
                return

    async def _send_again(self, request: bytes) -> None:
        if self._random.random() < 0.5:
            await asyncio.sleep(self._random.uniform(0, self._replay_seconds))
        reader, writer = await asyncio.open_connection("127.0.0.1", self._target)
        try:
            writer.write(request)
            await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _REPLAY_SECONDS)
        except (TimeoutError, asyncio.IncompleteReadError):
            pass  # a replayed wait lasts as long as it likes, nobody hears its answer
        finally:
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either side, the budget or the hole ends it."""
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
            try:
                await self._between((reader, writer), (there, back))
            finally:
                back.transport.abort()
        finally:
            writer.transport.abort()

    async def _between(self, client: _Streams, server: _Streams) -> None:
        endless = 1 << 40
        budget = self._random.randint(100, self._most_bytes or endless)
        up, down = (budget, endless) if self._random.random() < 0.5 else (endless, budget)
        directions = [self._relay(client[0], server[1], up, Requests())]
        if self._happens("black_hole", self._black_hole):
            directions.append(asyncio.sleep(self._hole_seconds))
        else:
            directions.append(self._relay(server[0], client[1], down, None))
        tasks = [asyncio.ensure_future(direction) for direction in directions]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        async def quietly() -> None:
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await coroutine

        task = asyncio.ensure_future(quietly())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def run(self, started: threading.Event, stop: asyncio.Event) -> None:
        """Listens at `port` until `stop`."""
        server = await asyncio.start_server(
            lambda reader, writer: self._begin(self.serve(reader, writer)), "127.0.0.1", 0
        )
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        await stop.wait()
        server.close()
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)
        await asyncio.sleep(0)  # in which aborted connections end


@contextlib.contextmanager
def lossy(
    url: str, seed: int, most_bytes: int | None, **faults: float
) -> Iterator[tuple[str, LossyProxy]]:
    """The address of a lossy proxy before `url`, and the proxy."""
    host, port = url.rsplit(":", 1)
    proxy = LossyProxy(int(port), seed, most_bytes, **faults)
    started, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    def serve() -> None:
        loop.run_until_complete(proxy.run(started, stop))
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert started.wait(30)
        yield f"{host}:{proxy.port}", proxy
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
