"""Dispatcher: the lane of sequenced operations, the tasks beside it, and the end of both
(imports the contract, record, pauses, watch)."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from ..errors import (
    AuthenticationError,
    BackendError,
    ConflictError,
    ForkedProcessError,
    LeaseError,
    OperationCancelled,
    ProtocolError,
    RemoteRLError,
    RunLostError,
    UnreachableError,
    as_remote_error,
)
from ..requests import Abort, Push, Sync
from ..types.results import Done
from .pauses import NAMES, Pauses
from .record import Record, State
from .watch import Watch, contained

if TYPE_CHECKING:
    from .dispatcher import Dispatcher

log = logging.getLogger("remote_rl.dispatcher")

#: the task of a sequenced operation, by name
_LANE = "remote_rl training lane"


class Runner:
    """Executes records: sequenced ones one after the other, all others as they come.

    running: the records whose method has begun and not returned.
    """

    def __init__(self, dispatcher: Dispatcher, stall_timeout: float) -> None:
        self.dispatcher = dispatcher
        self.running: set[Record] = set()
        self.watch = Watch(self, stall_timeout)
        self.pauses = Pauses(dispatcher.rules, self._execute, self._begin, dispatcher.clock.now)
        self._lane: deque[Record] = deque()
        self._turn: asyncio.Task[None] | None = None  # of the lane's record that runs
        self._watching: asyncio.Task[None] | None = None
        self._stopped = False

    def start(self) -> None:
        """Starts the lane and the watch."""
        self._watching = asyncio.create_task(self.watch.serve(), name="remote_rl watch")
        self._watching.add_done_callback(self._watch_ended)
        self._next_turn()

    async def close_backend(self) -> None:
        """Closes it, or kills what does not close for as long as a stall may last."""
        dispatcher, patience = self.dispatcher, self.watch.timeout
        closing = asyncio.ensure_future(contained(dispatcher.backend.close()))
        ended, _ = await asyncio.wait([closing], timeout=patience)
        if not ended:
            log.error(
                "backend %r did not close within %g s; killed", dispatcher.backend.name, patience
            )
            self.kill()
            closing.cancel()
        for executor in dispatcher.executors.values():
            executor.shutdown(wait=False, cancel_futures=True)
        if ended:
            await closing  # raises what the backend raised

    def _watch_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._failed_itself(task.get_name(), task.exception())

    def _failed_itself(self, name: str, error: BaseException | None) -> None:
        """Ends the run where one of the runner's own tasks has failed, or the watch has ended."""
        if self._stopped:
            return
        lost = self.dispatcher.gate.run_lost(f"the run ended because its {name} failed: {error!r}")
        lost.__cause__ = error
        self.end_run(lost)

    async def stop(self) -> None:
        """Cancels the watch and everything that runs, and waits until they have ended, for as long
        as a stall may last."""
        self._stopped = True
        own = [task for task in (self._watching, self._turn) if task is not None]
        tasks = {*own, *(record.task for record in self.running if record.task)}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=self.watch.timeout)
        if self.running:
            names = ", ".join(sorted(record.operation.name for record in self.running))
            log.error("%s: no heed of a cancellation; the backend is killed", names)
            self.kill()

    def kill(self) -> None:
        """Kills the backend; what that raises must not keep anybody waiting."""
        try:
            self.dispatcher.backend.kill()
        except Exception:
            log.exception("the kill of backend %r failed", self.dispatcher.backend.name)

    def end_run(self, lost: RunLostError) -> None:
        """The run is over, for everybody at once: the backend is killed, and what it still runs is
        cancelled and not waited for. Nothing that it may yet do is taken in."""
        if self.dispatcher.gate.lost is not None:
            return
        log.error("the run ends: %s", lost)
        self.kill()
        for record in self.running:
            record.end_early(lost)
            if not record.done:
                record.settle(error=lost.copy())
            if record.task is not None and record.task is not asyncio.current_task():
                record.task.cancel()
        self.dispatcher.gate.lose(lost)

    def engine_lost(self, reason: str) -> None:
        """The backend says that its engine has died."""
        name = self.dispatcher.backend.name
        self.end_run(
            self.dispatcher.gate.run_lost(f"the run ended because backend {name!r} died: {reason}")
        )

    def enqueue(self, record: Record) -> None:
        """A sequenced record whose turn in its client's order has come."""
        if record.state is State.HELD:
            record.state = State.QUEUED
        self._lane.append(record)
        self._next_turn()

    def begin(self, record: Record) -> None:
        """Any other record: runs beside the others."""
        if record.operation.name in NAMES:
            self.pauses.accept(record)
        else:
            self._begin(record, self._execute(record))

    def _begin(self, record: Record, work: Coroutine[Any, Any, None]) -> None:
        record.task = asyncio.create_task(work)

    def ignore_late(self, record: Record) -> None:
        """A control operation that a newer one has overtaken: answered, not done."""
        record.settle(result=Done(version=self.dispatcher.rules.version))
        self.dispatcher.settled(record)

    def _next_turn(self) -> None:
        """Begins the lane's next record at once, where none runs."""
        if self._turn is not None or not self._lane or self._stopped or self._watching is None:
            return
        record = self._lane.popleft()
        record.task = self._turn = asyncio.get_running_loop().create_task(
            self._take_turn(record), name=_LANE
        )
        self._turn.add_done_callback(functools.partial(self._turn_over, record))

    def _turn_over(self, record: Record, task: asyncio.Task[None]) -> None:
        """Where it was cancelled before its first step, nothing in it has told the next one."""
        if task is not self._turn:
            return
        self._turn = None
        if not self._stopped and not (record.done and record.error is None):
            why = f"{record.operation.name} was cancelled before it began"
            self._fail(record, record.error or OperationCancelled(why))
            self.dispatcher.settled(record)
        self._next_turn()

    async def _take_turn(self, record: Record) -> None:
        try:
            if record.deadline is not None:  # it may just have passed
                self.watch.check(record, self.dispatcher.clock.now())
            if not record.done:
                await self._execute(record)
            elif record.error is not None:
                # cancelled while it waited: its failure counts where it stood
                self.dispatcher.rules.failed(record.operation, record.error, began=False)
        except Exception as error:  # noqa: BLE001 - the dispatcher's own; a backend's ends in its record
            self._failed_itself(_LANE, error)
        finally:  # not once the task has ended: what is submitted at its outcome begins at once
            self._turn = None
            self._next_turn()

    async def _execute(self, record: Record) -> None:
        dispatcher = self.dispatcher
        if record.done or dispatcher.stopping.holds_back(record):
            return
        record.state = State.RUNNING
        record.started = record.last_sign = dispatcher.clock.now()
        dispatcher.statistics.started(record)
        self.running.add(record)
        try:
            if record.operation.name == "pause":
                self._refuse_pause_of_a_waiting_sync()
            if record.operation.name == "abort":
                result = await self._abort(record)
            else:
                result = await dispatcher.execution.run(
                    record.operation, record.request, dispatcher.context_of(record)
                )
        except asyncio.CancelledError:
            error = record.ending or OperationCancelled(f"{record.operation.name} was cancelled")
            self._fail(record, error)
        except BaseException as caught:
            if not isinstance(caught, RemoteRLError):
                log.exception("%s failed in the backend", record.operation.name)
            error = record.ending or _for_the_caller(caught)
            if isinstance(error, RunLostError):
                error = dispatcher.gate.with_checkpoint(error)
            self._fail(record, error)
            if isinstance(error, RunLostError):
                self.end_run(error)
        else:
            if record.operation.name in NAMES:
                self.pauses.succeeded(record)
            if record.ending is not None:
                self._fail(record, record.ending)
            elif not record.done:
                record.settle(result=result)
        finally:
            self.running.discard(record)
            dispatcher.settled(record)

    def waiting_delivery(self) -> Record | None:
        """The sync or push that waits for generates to end, while new ones wait for it."""
        for other in self.running:
            if isinstance(other.request, (Push, Sync)) and other.request.in_flight == "wait":
                return other
        return None

    def _refuse_pause_of_a_waiting_sync(self) -> None:
        delivery = self.waiting_delivery()
        if delivery is not None:
            raise ConflictError(
                f"pause refused: a {delivery.operation.name} with in_flight='wait' is waiting for "
                "generates to end, and they never would; pause after it"
            )

    def _fail(self, record: Record, error: RemoteRLError) -> None:
        self.dispatcher.rules.failed(record.operation, error, record.began)
        if not record.done:
            record.settle(error=error)

    async def _abort(self, record: Record) -> Done:
        """Tells the named generates (or all) to end, and waits until they have."""
        request = record.request
        assert isinstance(request, Abort)
        chosen = [
            other
            for other in self.running
            if other.operation.name == "generate"
            and (
                _called_before(other, record)
                if request.request_ids is None
                else other.request_id in request.request_ids
            )
        ]
        for other in chosen:
            other.end_early(None)
        for other in chosen:
            await other.settled.wait()
        return Done(version=self.dispatcher.rules.version)


#: a backend that is itself somebody's client may raise these; to the caller of this run they would
#: say that its own session has ended
_OF_A_SESSION = (
    AuthenticationError,
    ForkedProcessError,
    LeaseError,
    ProtocolError,
    UnreachableError,
)


def _for_the_caller(caught: BaseException) -> RemoteRLError:
    if not isinstance(caught, _OF_A_SESSION):
        return as_remote_error(caught)
    error = BackendError(f"{type(caught).__name__}: {caught}")
    error.__cause__ = caught
    return error


def _called_before(generate: Record, abort: Record) -> bool:
    """Whether an abort of everything means this generate: of the asker's own those called before
    it, however late it arrives; of others' those that were accepted."""
    if generate.client_id != abort.client_id:
        return generate.accepted <= abort.accepted
    return generate.key[1] <= abort.generates_before
