"""A TCP proxy, in a thread of its own, that cuts connections wherever they happen to be."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Iterator


class LossyProxy:
    """Relays to `port`, and cuts each connection once it has carried a random number of bytes in
    one direction: in a request, between request and answer, or in an answer."""

    def __init__(self, port: int, seed: int, most_bytes: int) -> None:
        self.cuts = 0
        self._target = port
        self._random = random.Random(seed)
        self._most_bytes = most_bytes
        self._tasks: set[asyncio.Task[None]] = set()

    async def _relay(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, budget: int
    ) -> None:
        while piece := await reader.read(min(65536, budget)):
            writer.write(piece)
            await writer.drain()
            budget -= len(piece)
            if budget <= 0:
                self.cuts += 1
                return

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either side or the budget ends it."""
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        budget = self._random.randint(100, self._most_bytes)
        up, down = (budget, 1 << 40) if self._random.random() < 0.5 else (1 << 40, budget)
        directions = [
            asyncio.ensure_future(self._relay(reader, back, up)),
            asyncio.ensure_future(self._relay(there, writer, down)),
        ]
        await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        for direction in directions:
            direction.cancel()
        await asyncio.gather(*directions, return_exceptions=True)
        for end in (writer, back):
            end.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            await self.serve(reader, writer)

    async def run(self, started: threading.Event, stop: asyncio.Event) -> None:
        """Listens at `port` until `stop`."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        await stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks)


@contextlib.contextmanager
def lossy(url: str, seed: int, most_bytes: int) -> Iterator[tuple[str, LossyProxy]]:
    """The address of a lossy proxy before `url`, and the proxy."""
    host, port = url.rsplit(":", 1)
    proxy = LossyProxy(int(port), seed, most_bytes)
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
