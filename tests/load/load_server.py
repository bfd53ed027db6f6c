"""Servers for the load tests: in this process, on a thread, and in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from aiohttp import web
from load_backend import Light, Staging

from remote_rl.dispatcher import Dispatcher
from remote_rl.messages import Message
from remote_rl.server.app import application, runner


class Served:
    """A dispatcher behind a loopback port, from the constructor to `stop`.

    answers: how often each message was answered how, as (message, answer) class names.
    most_connections: distinct sockets that were open at once.
    """

    def __init__(self, backend: Any, *, io_timeout: float = 60.0, **options: Any) -> None:
        self.dispatcher = Dispatcher(backend, **options)
        self.answers: Counter[tuple[str, str]] = Counter()
        self.most_connections = 0
        self._io_timeout = io_timeout
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="load server")
        self._thread.start()
        self.port = self._run(self._start())
        self.url = f"http://127.0.0.1:{self.port}"

    async def _start(self) -> int:
        await self.dispatcher.start()
        app = application(self, io_timeout=self._io_timeout)
        self._runner = runner(app, shutdown_seconds=0.5)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return int(self._runner.addresses[0][1])

    async def handle(self, message: Message) -> Any:
        """The dispatcher's answer, counted."""
        self.most_connections = max(self.most_connections, self.connections)
        answer = await self.dispatcher.handle(message)
        self.answers[type(message).__name__, type(answer).__name__] += 1
        return answer

    @property
    def connections(self) -> int:
        """Sockets that are open now."""
        assert self._runner.server is not None
        return len(self._runner.server.connections)

    def kept(self) -> dict[str, int]:
        """Bytes that are kept for each client."""
        return {name: client.ledger.kept for name, client in self.dispatcher.gate.clients.items()}

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def stop(self) -> None:
        """Ends it."""

        async def end() -> None:
            await self.dispatcher.close()
            await self._runner.cleanup()

        self._run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Process:
    """A server of `Light` (or `Staging`, by `parts=True`) in a process of its own, whose memory can
    be looked at."""

    def __init__(self, **options: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.url = self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    @property
    def pid(self) -> int:
        return self._process.pid

    def collect(self) -> None:
        """Its garbage is collected."""
        assert self._process.stdin is not None
        self._process.stdin.write("collect\n")
        self._process.stdin.flush()
        assert self._line() == "collected"

    def stop(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


@contextlib.contextmanager
def process(**options: Any) -> Iterator[Process]:
    """One that is stopped at the end."""
    started = Process(**options)
    try:
        yield started
    finally:
        started.stop()


def wait_until(reached: Callable[[], bool], seconds: float = 120.0) -> None:
    """Looks until it is so, and fails where it never is."""
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.01)


def resident(pid: int | str = "self") -> int:
    """Bytes of memory that the process has now."""
    return _status(pid, "VmRSS")


def peak(pid: int | str = "self") -> int:
    """The most it had since `forget_peak`."""
    return _status(pid, "VmHWM")


def forget_peak(pid: int | str = "self") -> None:
    """The peak counts from now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _status(pid: int | str, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/{pid}/status has no {name}")


def main() -> None:
    """Serves until standard input ends."""
    options = json.loads(sys.argv[1])
    backend = Staging() if options.pop("parts", False) else Light()
    served = Served(backend, **options)
    print(served.url, flush=True)
    for _ in sys.stdin:
        gc.collect()
        print("collected", flush=True)
    served.stop()


if __name__ == "__main__":
    main()
