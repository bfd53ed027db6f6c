"""What the benchmarks compare remote_rl with: the same aiohttp, without remote_rl in it.

The client lives on a loop thread as remote_rl's own does, so that a blocking caller pays the same
for its way to the loop and back.
"""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
from served import LENGTH, MOMENT

from remote_rl.client.loop import LoopThread
from remote_rl.messages import Submit
from remote_rl.requests import ZeroGrad
from remote_rl.transports.bodies import CHUNK_BYTES, FRAME_TYPE
from remote_rl.wire import seal

SERVED = Path(__file__).with_name("served.py")


def timed(function: Callable[[], Any]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def small_submit() -> Submit:
    """What a small operation sends."""
    return Submit(
        operation="zero_grad",
        number=1,
        request=ZeroGrad(),
        digest=seal(ZeroGrad()),
        linger=0.05,
        client_id="c" * 32,
        instance_id="i" * 32,
    )


@contextlib.contextmanager
def serving() -> Iterator[tuple[str, int]]:
    """The server process: its address, and the port of its plain socket."""
    with subprocess.Popen(
        [sys.executable, str(SERVED)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        try:
            yield told["url"], told["socket"]
        finally:
            process.stdin.close()


class Bare:
    """An aiohttp client that posts bytes, set up as remote_rl's transport is."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._thread = LoopThread()
        self._session = self._thread.run(_session())

    def post(self, path: str, data: Any, size: int) -> bytes:
        """The answer's body."""
        return self._thread.run(self._post(path, data, size))

    async def _post(self, path: str, data: Any, size: int) -> bytes:
        headers = {"Content-Type": FRAME_TYPE, "Content-Length": str(size)}
        async with self._session.post(self.url + path, data=data, headers=headers) as response:
            assert response.status == 200, response.status
            return await response.read()

    def repeat_post(self, path: str, data: bytes, count: int) -> list[float]:
        """Seconds of each of `count` posts, measured on the loop, one after the other."""

        async def several() -> list[float]:
            taken = []
            for _ in range(count):
                began = time.perf_counter()
                await self._post(path, data, len(data))
                taken.append(time.perf_counter() - began)
            return taken

        return self._thread.run(several())

    def close(self) -> None:
        """Ends connection and thread."""
        self._thread.run(self._session.close())
        self._thread.stop()


async def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=8),
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
        read_bufsize=CHUNK_BYTES,
    )


async def in_pieces(data: bytes) -> AsyncIterator[memoryview]:
    """Uncopied pieces, as remote_rl's transport sends them."""
    view = memoryview(data)
    for start in range(0, len(view), CHUNK_BYTES):
        yield view[start : start + CHUNK_BYTES]


class RawSocket:
    """A plain connection."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))

    def send(self, data: bytes) -> float:
        """Sends, and waits to hear when all of it had arrived."""
        self._socket.sendall(LENGTH.pack(len(data)))
        self._socket.sendall(data)
        moment: float = MOMENT.unpack(self._socket.recv(MOMENT.size, socket.MSG_WAITALL))[0]
        return moment

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()


def alternating(
    candidates: Mapping[str, Callable[[], Callable[[], Any]]], rounds: int, warmup: int = 3
) -> dict[str, list[float]]:
    """Seconds of each candidate in each round. Every round runs all, each time beginning with
    another, so that what else the machine does falls on all alike. A candidate is called once for
    what is not measured (fresh data) and returns what is."""
    names = list(candidates)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warmup, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            measured = candidates[name]()
            began = time.perf_counter()
            measured()
            seconds = time.perf_counter() - began
            if number >= 0:
                taken[name].append(seconds)
    return taken


def paired_ratio(one: list[float], other: list[float]) -> float:
    """The median over rounds of `one` by `other`, each ratio of one and the same round."""
    return statistics.median(a / b for a, b in zip(one, other))
