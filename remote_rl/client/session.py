"""Client: a session, one process's attachment to one run (imports the contract and its faces)."""

from __future__ import annotations

import asyncio
import atexit
import logging
import time
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..errors import ConflictError, InvalidRequestError, RemoteRLError
from ..ops import Stream
from ..progress_line import ProgressLine
from ..requests import Half, Info, Reset, Sleep, Tokenizer, Wake
from ..run_info import RunInfo
from ..types.results import Done
from .connection import Connection
from .download import download_files
from .faces import Face
from .handle import Handle
from .loop import LoopThread
from .operation import Operation
from .sampling import Sampling
from .tokenizer import load_tokenizer
from .training import Training
from .weights import Weights

#: seconds after which a close looks whether it waits for what is paused
_PAUSE_CHECK = 1.0
#: seconds after which a close that still waits says so in the log
_PATIENCE = 10.0
log = logging.getLogger("remote_rl.client")

#: held until they are closed: one that nobody holds still has its lease and its work under way
_open_sessions: set[Session] = set()


@atexit.register
def _warn_of_open_sessions() -> None:
    for session in list(_open_sessions):
        session._warn_if_open()


class Session(Face):
    """What `connect` returns; a context manager, also for `async with`.

    training, sampling, weights: the faces. A clean exit of `with` waits for everything that was
    submitted and raises a failure nobody looked at; an exception or Ctrl-C cancels what has not
    started. A run in this process ends with its session; a server's run stays.
    """

    def __init__(self, connection: Connection, loop: LoopThread, url: str | None) -> None:
        super().__init__(connection)
        self.training = Training(connection)
        self.sampling = Sampling(connection)
        self.weights = Weights(connection)
        self._loop = loop
        self._url = url
        self._closed = False
        _open_sessions.add(self)

    # -- the run --------------------------------------------------------------------------------

    def info(self) -> Operation[RunInfo]:
        """What the run is and what its backend offers, now."""
        operation: Operation[RunInfo] = self._submit("info", Info())
        return operation

    @property
    def role(self) -> str:
        """ "driver" or "member"."""
        return self._connection.grant.role

    def tokenizer(self) -> Operation[Any]:
        """The model's tokenizer, loaded: the built-in byte tokenizer, or a Hugging Face one
        (`pip install 'remote-rl[tokenizer]'`)."""
        operation: Operation[Any] = self._submit("tokenizer", Tokenizer(), load_tokenizer)
        return operation

    def handle(self) -> Handle:
        """What another process needs to attach to this run as a member."""
        if self._url is None:
            raise InvalidRequestError(
                "a run inside this process can't be attached to from elsewhere: start "
                "`remote-rl serve` and connect to its address"
            )
        grant = self._connection.grant
        return Handle(url=self._url, instance_id=grant.instance_id, epoch=grant.epoch)

    def reset(self) -> Operation[Done]:
        """Back to the base weights; optimizer, seeds, reference and snapshots too."""
        operation: Operation[Done] = self._submit("reset", Reset())
        return operation

    def sleep(self, half: Half) -> Operation[Done]:
        """Lets "training" or "sampling" give its memory back; what needs it wakes it."""
        operation: Operation[Done] = self._submit("sleep", Sleep(half=half))
        return operation

    def wake(self, half: Half) -> Operation[Done]:
        """Wakes "training" or "sampling" before it is needed."""
        operation: Operation[Done] = self._submit("wake", Wake(half=half))
        return operation

    def download(self, kind: str, name: str, destination: str | Path) -> Path:
        """Copies a "checkpoint" or an "export" to a local directory, which must not exist yet or
        be empty; blocks, and returns the directory."""
        return download_files(self, kind, name, Path(destination))

    # -- the end --------------------------------------------------------------------------------

    def detach(self) -> None:
        """Leaves the run without waiting for what was submitted: it goes on there, if it has
        started. A run inside this process ends."""
        if not self._closed:
            self._connection.check_process()
            self._connection.refuse_in_custom_loss("detach")
            self._closed = True
            _open_sessions.discard(self)
            self._connection.closing = True
            try:
                self._loop.run(self._connection.detach())
            finally:
                self._loop.stop()

    def close(self) -> None:
        """Waits for everything that was submitted, leaves the run, and raises the first failure
        that nobody has looked at. A second call does nothing."""
        if self._closed:
            return
        self._connection.check_process()
        self._connection.refuse_in_custom_loss("close")
        try:
            self._drain()
            failure = self._connection.failures.first(lambda call: True)
        finally:
            self.detach()
        if failure is not None:
            raise failure

    def _drain(self) -> None:
        """Waits until everything has an outcome. Generates that are held by a pause never would:
        they are cancelled, and the session says so."""
        began, told, line = time.monotonic(), False, ProgressLine()
        while pending := self._connection.pending():
            ended = pending[0].ending.wait(_PAUSE_CHECK)
            if not ended:
                waits = ", ".join(sorted({call.row.name for call in pending}))
                line.show(f"remote_rl: closing, waits for {len(pending)} operation(s): {waits}")
                if not told and time.monotonic() - began > _PATIENCE:
                    log.warning("close waits for %d operation(s): %s", len(pending), waits)
                    told = True
            if ended or any(call.row.stream is not Stream.SAMPLING for call in pending):
                continue
            if self._is_paused():
                for call in pending:
                    self._connection.cancel(call)
                for call in pending:
                    call.ending.wait()
                line.clear()
                raise ConflictError(
                    f"the session was closed while generation was paused: {len(pending)} "
                    "generate(s) were cancelled; resume before closing"
                )
        line.clear()

    def _is_paused(self) -> bool:
        """Asks the run, without raising what else may have failed."""
        call = self._submit("info", Info())._call
        try:
            return bool(call.own_outcome().paused)
        except RemoteRLError:  # the run is gone, and with it all that was waited for
            return False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        if self._closed:
            return
        failure = self._connection.failures.first(lambda call: True)
        if failure is not None:
            error.add_note(f"an operation that was not awaited failed earlier: {failure}")
        try:
            self.detach()  # which ends what has not started
        except Exception as closing:  # noqa: BLE001 - the caller's own exception is the one to see
            error.add_note(f"closing the session failed too: {closing!r}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.__exit__, kind, error, traceback)

    def _warn_if_open(self) -> None:
        """At the interpreter's end nothing can be waited for any more, but it can be said."""
        connection = self._connection
        if self._closed or not connection.is_of_this_process:
            return
        lost = len(connection.pending())
        failure = connection.failures.first(lambda call: True)
        if lost or failure is not None:
            warnings.warn(
                f"the program ended without closing {self!r}: {lost} operation(s) had not ended"
                + (f", and one had failed ({failure})" if failure is not None else "")
                + "; use `with connect(...)` or call close()",
                RuntimeWarning,
                stacklevel=1,
            )

    def __repr__(self) -> str:
        state = "closed" if self._closed else self.role
        target = self._connection.transport.target
        return f"Session({target!r}, {state}, epoch {self._connection.grant.epoch})"
