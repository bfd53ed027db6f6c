"""Client: numbers, resending, waiting and the lease of one attached process (imports the contract).

Everything below the line "on the loop" runs on the session's loop thread; what is above it may be
called from any thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from ..errors import (
    ConflictError,
    ForkedProcessError,
    InvalidRequestError,
    LeaseError,
    OperationCancelled,
    RemoteRLError,
    RunLostError,
    UnreachableError,
    as_remote_error,
    describe,
)
from ..messages import (
    Detach,
    Digest,
    Grant,
    Key,
    Outcome,
    Transport,
    Waited,
)
from ..ops import OPERATIONS, Stream
from ..ops import Operation as Row
from ..requests import Abandon, Delete, Request
from .delivery import Delivery
from .failures import Failures
from .link import Link
from .loop import LoopThread
from .operation import Call
from .waiting import Waiting
from .worker import Worker

log = logging.getLogger("remote_rl.client")
_SAMPLING = Stream.SAMPLING.value


class Connection:
    """One client id on one run: hands out numbers in call order and brings every outcome back."""

    def __init__(self, transport: Transport, loop: LoopThread, grant: Grant) -> None:
        self.transport = transport
        self.grant = grant
        self._link = Link(transport, grant)
        self.client_id = grant.client_id
        self.broken: RemoteRLError | None = None
        self.closing = False
        self._loop = loop
        self._process = os.getpid()
        self._lock = threading.RLock()
        self.worker = Worker("remote_rl client jobs")
        self._numbers = dict.fromkeys((stream.value for stream in Stream), 0)
        self._calls: dict[Key, Call] = {}
        self.failures = Failures()
        self._delivery = Delivery(self._link, transport.submits)
        self._waiting = Waiting(self._link)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._waiter: asyncio.Task[None] | None = None
        self._acknowledging: asyncio.Task[None] | None = None
        loop.when_broken = self._loop_ended
        loop.call(self._keep, self._keep_lease())

    # -- from any thread ------------------------------------------------------------------------

    @property
    def is_of_this_process(self) -> bool:
        """Whether no fork lies between its opening and now."""
        return os.getpid() == self._process

    def check_process(self) -> None:
        """Raises in a forked child, where loop and connections are not alive."""
        if not self.is_of_this_process:
            raise ForkedProcessError(
                "this session was opened in the parent process; in a forked child, connect with "
                "its handle instead"
            )

    def refuse_in_custom_loss(self, what: str) -> None:
        """Raises on the thread of custom losses: the loss comes first in the order, and whatever
        comes after it would wait for it while it waits."""
        if self.worker.is_this_thread:
            raise InvalidRequestError(
                f"{what} inside the function of losses.custom would wait for the loss itself; do "
                "it before forward_backward and pass its result in",
                operation=what,
            )

    def reserve(self, name: str, convert: Callable[[Any], Any]) -> Call:
        """Takes the next number of the operation's stream, for `send` to fill."""
        row = OPERATIONS[name]
        if row.sequenced and self.worker.is_this_thread:
            self.refuse_in_custom_loss(name)
        with self._lock:
            if self.closing:
                raise LeaseError("the session is closed; connect again")
            if self.broken is not None:
                raise self.broken.copy()
            number = self._numbers[row.stream_name] + 1
            self._numbers[row.stream_name] = number
            call = Call(self, row, number, convert)
            call.generates_before = self._numbers[_SAMPLING]
            self._calls[call.key] = call
        return call

    @property
    def ordering(self) -> threading.RLock:
        """Held while numbers are taken and sent, in their order; raises in a forked child."""
        self.check_process()
        return self._lock

    def send(
        self, call: Call, request: Request, digest: Digest | None, deadline: float | None = None
    ) -> None:
        """Submits the request under the call's number; returns at once.

        digest: `transport.digest(request)`, taken before the number is, since it fails where the
        request can't cross, and a number that is never sent would hold up all after it.
        """
        if isinstance(request, Delete) and request.kind == "checkpoint":
            self._link.checkpoints.forget(request.name)
        self._post(self._deliver(call, call.row, request, digest, deadline))

    def abandon(self, call: Call, error: BaseException) -> None:
        """Fills a reserved number with a failure; the caller gets `error` itself."""
        row = OPERATIONS["abandon"]
        request = Abandon(reason=describe(error))
        self._finish(call, error=error)
        digest = self.transport.digest(request)
        self._post(self._deliver(call, row, request, digest, None))

    def withdraw(self, calls: Iterable[Call], error: BaseException) -> None:
        """Reserved numbers that were not sent never will be: they fail with `error`, and the run is
        told, so that nothing waits for them. Unlike `abandon` it spoils no gradient."""
        for call in calls:
            self._finish(call, error=error)
            self._post(self._ask_to_cancel(call))

    def cancel(self, call: Call) -> None:
        """Asks for the call not to start, or a generate to end."""
        call.cancel_asked = True
        if not call.done:
            self._post(self._ask_to_cancel(call))

    def stream(self, call: Call) -> None:
        """Brings the samples of a generate as they finish."""
        if not call.streaming and not call.done:
            call.streaming = True
            self._loop.call(self._waiting.ask_anew)

    def pending(self) -> list[Call]:
        """Calls without an outcome, oldest first."""
        with self._lock:
            return list(self._calls.values())

    def _post(self, coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            self._loop.call(self._keep, coroutine)
        except RuntimeError:  # the session was closed meanwhile, and every call has its failure
            coroutine.close()

    # -- on the loop ----------------------------------------------------------------------------

    def _keep(self, coroutine: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = self._loop.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _loop_ended(self) -> None:
        reason = "the session's event loop was ended from within, as by a SystemExit in the backend"
        last = self._link.checkpoints.last
        self.break_off(RunLostError(f"{reason}; connect again", last_checkpoint=last))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            error = task.exception()
            log.error("the client's loop failed", exc_info=error)
            self.break_off(as_remote_error(error) if error is not None else None)

    def break_off(self, error: RemoteRLError | None) -> None:
        """Nothing more can be said to the run: every call that is open fails."""
        with self._lock:
            if self.broken is None:
                self.broken = error
            calls = list(self._calls.values())
        for call in calls:
            self._finish(call, error=(error or LeaseError("the session was closed")).copy())

    def _finish(self, call: Call, response: Any = None, error: BaseException | None = None) -> None:
        call.finish(response, error)
        if call.error is not None:
            self.failures.add(call)
        with self._lock:  # last: what is no longer pending has its failure on record
            self._calls.pop(call.key, None)

    async def _deliver(
        self, call: Call, row: Row, request: Request, digest: Digest | None, deadline: float | None
    ) -> None:
        try:
            outcome = await self._delivery.submit(call, row, request, digest, deadline)
        except (RunLostError, LeaseError, UnreachableError) as error:
            self.break_off(error)  # first: whoever hears of it finds the session ended
            self._finish(call, error=error)
        except ConflictError as error:
            self._finish(call, error=error)
        except RemoteRLError as error:
            # Refused: without a tombstone, everything after its number would wait for it. Or the
            # answer was garbled, it counts, and a caller told otherwise would do it twice.
            call.refusal = error
            await self._settle_refused(call, error)
        else:
            if outcome is None:  # it ended before the run had it
                return
            self._take(outcome)
            if not outcome.done:
                self._start_waiting()

    def _take(self, outcome: Outcome) -> None:
        if not outcome.done:
            return
        key = (outcome.stream, outcome.number)
        self._link.acknowledge(key)
        self._link.checkpoints.note(outcome.result)
        with self._lock:
            call = self._calls.get(key)
        if isinstance(outcome.error, (RunLostError, LeaseError)):
            self.break_off(outcome.error)
        if call is not None:
            buried = isinstance(outcome.error, OperationCancelled) and call.refusal is not None
            self._finish(call, outcome.result, call.refusal if buried else outcome.error)
        if self._delivery.heard() and (self._acknowledging is None or self._acknowledging.done()):
            self._acknowledging = self._keep(self._acknowledge())

    async def _acknowledge(self) -> None:
        try:
            await self._delivery.acknowledge()
        except RemoteRLError as error:
            self.break_off(error)

    def _start_waiting(self) -> None:
        if self._waiter is None or self._waiter.done():
            self._waiter = self._keep(self._wait_for_outcomes())

    async def _wait_for_outcomes(self) -> None:
        while self.pending():
            cursors = {
                str(call.number): len(call.samples) for call in self.pending() if call.streaming
            }
            try:
                waited = await self._waiting.ask(cursors)
            except RemoteRLError as error:
                self.break_off(error)
                return
            if waited is not None:
                self._take_waited(waited)

    def _take_waited(self, waited: Waited) -> None:
        with self._lock:
            calls = dict(self._calls)
        for report in waited.progress:
            call = calls.get((report.stream, report.number))
            if call is not None:
                call.progress = report
        for partial in waited.partials:
            call = calls.get((_SAMPLING, partial.number))
            if call is not None:
                call.add_samples(partial.start, list(partial.samples.samples()))
        for outcome in waited.outcomes:
            self._take(outcome)

    async def _settle_refused(self, call: Call, error: RemoteRLError) -> None:
        try:
            cancelled = await self._delivery.cancel(call)
        except ConflictError:
            return  # its outcome has come meanwhile, and was acknowledged
        except RemoteRLError as unknown:
            # nobody can tell whether it counts, so nothing after it would mean what it says
            self.break_off(unknown)
            self._finish(call, error=error)
            return
        if cancelled:
            self._finish(call, error=error)
        self._start_waiting()

    async def _ask_to_cancel(self, call: Call) -> None:
        try:
            await self._delivery.cancel(call)
        except RemoteRLError as error:
            if not call.done:
                log.warning("cancelling %s failed: %s", call.request_id, error)
        self._start_waiting()

    async def _keep_lease(self) -> None:
        try:
            await self._link.keep_lease()
        except RemoteRLError as error:
            self.break_off(error)

    async def detach(self) -> None:
        """Gives the lease back and lets go of the transport."""
        try:
            if self.broken is None:
                await asyncio.wait_for(self._link.talk(lambda leased: Detach(**leased), 5.0), 10.0)
        except (RemoteRLError, TimeoutError) as error:
            log.warning("detaching from %s failed: %s", self.transport.target, error)
        finally:
            self.break_off(LeaseError("the session was closed before the operation ended"))
            for task in list(self._tasks):
                if task is not asyncio.current_task():
                    task.cancel()
            self.worker.stop()
            await self.transport.close()
