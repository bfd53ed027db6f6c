"""Arctic backend: the process that holds the engine, as the backend sees it (imports channel,
leftovers and the contract)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import attrs

from remote_rl.errors import BackendError
from remote_rl.protocol import OperationContext
from remote_rl.types import Devices

from .channel import Channel
from .leftovers import Owner, end_processes, end_session, kill_session, remove_segments

log = logging.getLogger("remote_rl.arctic")

_CLOSE_SECONDS = 15.0
#: how long one may take to exit that has closed its end of the channel
_EXIT_SECONDS = 5.0
_LAST_LINES = 40


@attrs.frozen(kw_only=True)
class Facts:
    """What the dispatcher said of one operation, for the engine's side."""

    operation: str
    request_id: str
    version: int
    next_version: int
    directory: Path | None
    seed: int


@attrs.frozen(kw_only=True)
class Started:
    """What the start of an engine answers. devices: what it computes on. withheld: options of
    `SamplingParams` that are offered in general and not with this model, by name."""

    devices: Devices
    withheld: frozenset[str] = frozenset()


@attrs.define(eq=False)
class _Call:
    facts: Facts
    context: OperationContext
    result: asyncio.Future[Any]


class Child:
    """One life of the engine's process: it starts, takes operations, and ends, by itself or not.
    Whatever way it ends, nothing of it is left behind.

    factory, arguments: what the process calls to make its engine; both are pickled.
    served: gets version and label whenever the sampler serves other weights.
    """

    def __init__(
        self,
        factory: Callable[..., Any],
        arguments: tuple[Any, ...],
        environment: Mapping[str, str],
        served: Callable[[int | None, int | str | None], None],
    ) -> None:
        self._factory = factory
        self._arguments = arguments
        self._environment = dict(environment)
        self._served = served
        self._calls: dict[int, _Call] = {}
        self._last = 0
        self._channel: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._workers: tuple[Owner, ...] = ()
        self._started = False
        self._closing = False
        self._tail = ""
        self._burying: asyncio.Task[None] | None = None
        self._collecting = threading.Lock()
        self._collector: threading.Thread | None = None
        self._collected: Future[int] = Future()
        self._collected.set_running_or_notify_cancel()  # nobody who waits cancels it
        self._answered = asyncio.Event()
        self._gone = asyncio.Event()
        self.directory = _own_directory()
        #: why it is over, None while it lives
        self.ended: str | None = None

    @property
    def process_id(self) -> int:
        """Of the process, once it was spawned."""
        assert self._process is not None
        return self._process.pid

    def spawn(self) -> None:
        """Starts the process."""
        ours, theirs = socket.socketpair()
        with theirs, (self.directory / "engine.log").open("wb") as output:
            # -P: a folder `backends` of the user's own must not be taken for ours
            number = str(theirs.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "backends.arctic.host", number, str(self.directory)],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # a Ctrl-C in the terminal is the backend's to handle, and what it starts is found
                # by the session
                start_new_session=True,
                env={**os.environ, **self._environment},
            )
        loop = asyncio.get_running_loop()
        self._channel = Channel(ours, loop, self._receive, self._over, self._collect_soon)
        self._channel.start()
        self._channel.send(("make", self._factory, self._arguments))

    async def call(self, facts: Facts, request: Any, context: OperationContext) -> Any:
        """One operation, there. Raises what it raises, and `BackendError` where the process
        ends."""
        if self.ended is not None or self._channel is None:
            raise self.failure(facts.operation)
        self._last += 1
        number = self._last
        call = _Call(facts, context, asyncio.get_running_loop().create_future())
        self._calls[number] = call
        aborting = asyncio.ensure_future(self._pass_abort(number, context))
        try:
            self._channel.send(("call", number, facts, request))
            result = await call.result
        finally:
            aborting.cancel()
            self._calls.pop(number, None)
        self._started = self._started or facts.operation == "start"
        return result

    async def _pass_abort(self, number: int, context: OperationContext) -> None:
        await context.abort_signal.wait()
        if self._channel is not None:
            self._channel.send(("abort", number))

    def failure(self, operation: str) -> BackendError:
        """What an operation fails with once the process is gone."""
        return BackendError(
            f"{operation} failed: the arctic engine's process is gone ({self.ended}); load a "
            "checkpoint, or reset, to start it again",
            worker="engine",
            traceback=self._tail,
        )

    # -- what it says -------------------------------------------------------------------------

    def _receive(self, message: tuple[Any, ...]) -> None:
        kind, *rest = message
        getattr(self, f"_hear_{kind}")(*rest)

    def _hear_done(self, number: int, result: Any) -> None:
        call = self._calls.get(number)
        if call is not None and not call.result.done():
            call.result.set_result(result)

    def _hear_failed(self, number: int, error: Exception) -> None:
        call = self._calls.get(number)
        if call is not None and not call.result.done():
            call.result.set_exception(error)

    def _hear_progress(self, number: int, done: float, total: float | None, what: str) -> None:
        call = self._calls.get(number)
        if call is not None:
            call.context.progress(done, total, what)

    def _hear_sample(self, number: int, sample: Any) -> None:
        call = self._calls.get(number)
        if call is not None:
            call.context.emit(sample)

    def _hear_serving(self, version: int | None, label: int | str | None) -> None:
        self._served(version, label)

    def _hear_workers(self, processes: tuple[Owner, ...]) -> None:
        self._workers = processes

    def _hear_log(self, name: str, level: int, text: str) -> None:
        logging.getLogger(name).log(level, "%s", text)

    def _hear_pong(self) -> None:
        self._answered.set()

    def _hear_lost(self, reason: str) -> None:
        self.ended = self.ended or reason

    # -- its end ------------------------------------------------------------------------------

    def _over(self, how: str) -> None:
        """The channel has ended, and the process with it or soon after."""
        self._burying = asyncio.get_running_loop().create_task(
            self._bury(how), name="arctic engine's end"
        )

    async def _bury(self, how: str) -> None:
        code = await asyncio.wrap_future(self._collected)
        if self.ended is None:
            self.ended = _how(code) if code else how
        if not self._closing:
            log.error("the arctic engine's process is gone: %s", self.ended)
        for call in list(self._calls.values()):
            if not call.result.done():
                call.result.set_exception(self.failure(call.facts.operation))
        self._served(None, None)
        self._gone.set()

    def _collect_soon(self) -> None:
        """Begins to remove it, in a thread that this process waits for before it exits, whatever
        becomes of the loop: it has started when this returns, whichever caller started it."""
        with self._collecting:
            if self._collector is None:
                # daemon is said: a thread of a daemon's would be one, and be cut off by the exit
                self._collector = threading.Thread(
                    target=self._collect, name="arctic engine's end", daemon=False
                )
                self._collector.start()

    def _collect(self) -> None:
        """Ends the process and all that it has started, and removes what they leave."""
        assert self._process is not None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_EXIT_SECONDS)
            end_session(self._process.pid)
            code = self._process.wait()
            end_processes(self._workers)
            remove_segments(self._process.pid)
            self._tail = self._last_output()
            shutil.rmtree(self.directory, ignore_errors=True)
        except BaseException as error:
            self._collected.set_exception(error)
            raise
        self._collected.set_result(code)

    def _last_output(self) -> str:
        try:
            text = (self.directory / "engine.log").read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""  # it was told to go before it began
        return "\n".join(text.splitlines()[-_LAST_LINES:])

    def kill(self) -> None:
        """Ends it at once, without waiting."""
        if self._process is not None and self._process.poll() is None:
            self.ended = self.ended or "it was killed"
            self._closing = True
            self._process.send_signal(signal.SIGKILL)
            kill_session(self._process.pid)
            end_processes(self._workers)
            self._collect_soon()

    async def alive(self) -> bool:
        """Whether it answers; where it can't any more, after its end was heard of."""
        if self._process is None or self._channel is None:
            return False
        if self.ended is None:
            self._answered.clear()
            self._channel.send(("ping",))
            waits = [asyncio.ensure_future(each.wait()) for each in (self._answered, self._gone)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            if self._answered.is_set():
                return True
        await self._gone.wait()
        return False

    async def close(self) -> None:
        """Ends it: in order where it has started, and at once where it hasn't. What doesn't end
        within 15 s is killed."""
        if self._process is None:
            shutil.rmtree(self.directory, ignore_errors=True)
            return
        assert self._channel is not None
        if self._started and not self._gone.is_set() and self._process.poll() is None:
            self.ended = self.ended or "it was closed"
            self._closing = True
            self._channel.send(("close",))
            try:
                await asyncio.wait_for(self._gone.wait(), _CLOSE_SECONDS)
            except TimeoutError:
                log.warning("the arctic engine did not close within %g s", _CLOSE_SECONDS)
        self.kill()
        await self._gone.wait()
        self._channel.close()


def _own_directory() -> Path:
    """A new one with a short name: Ray's sockets lie in it, whose names may have 107 bytes."""
    usual = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="rrl-", dir=usual if len(usual) <= 16 else "/tmp"))


def _how(code: int) -> str:
    if code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    return f"it exited with code {code}"
