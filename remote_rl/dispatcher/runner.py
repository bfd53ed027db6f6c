"""Dispatcher: the lane of sequenced operations, the tasks beside it, and the watch over both
(imports the contract, record, execution's caller)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from ..errors import (
    ConflictError,
    DeadlineExceededError,
    OperationCancelled,
    RemoteRLError,
    RunLostError,
    StalledError,
    as_remote_error,
)
from ..ops import OPERATIONS, Stream
from ..requests import Abort, Push, Resume, Sync
from ..types.results import Done
from .record import Record, State

if TYPE_CHECKING:
    from .dispatcher import Dispatcher

log = logging.getLogger("remote_rl.dispatcher")

_WATCH_INTERVAL = 0.5


class Runner:
    """Executes records: sequenced ones one after the other, all others as they come."""

    def __init__(self, dispatcher: Dispatcher, stall_timeout: float) -> None:
        self.dispatcher = dispatcher
        self.stall_timeout = stall_timeout
        self._paused_by: set[str] = set()
        self._lane: asyncio.Queue[Record] = asyncio.Queue()
        self._running: set[Record] = set()
        self._services: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Starts the lane and the watch."""
        self._services = [
            asyncio.create_task(self._serve_lane(), name="remote_rl training lane"),
            asyncio.create_task(self._watch(), name="remote_rl watch"),
        ]
        for service in self._services:
            service.add_done_callback(self._service_ended)

    async def watch_start(self, record: Record, starting: Coroutine[Any, Any, None]) -> None:
        """Waits for a backend's start for as long as it shows signs of life."""
        start, clock = asyncio.create_task(starting), self.dispatcher.clock
        record.last_sign = clock.now()
        while not (await asyncio.wait([start], timeout=min(1.0, self.stall_timeout)))[0]:
            if clock.now() - record.last_sign >= self.stall_timeout:
                self.dispatcher.backend.kill()
                start.cancel()
                raise StalledError(
                    f"the start of backend {self.dispatcher.backend.name!r} reported nothing for "
                    f"{self.stall_timeout:g} s"
                    + (f"; it was last {record.doing}" if record.doing else "")
                )
        await start

    async def close_backend(self) -> None:
        """Closes it, or kills what does not close for as long as a stall may last."""
        dispatcher = self.dispatcher
        closing, patience = asyncio.ensure_future(dispatcher.backend.close()), self.stall_timeout
        ended, _ = await asyncio.wait([closing], timeout=patience)
        if not ended:
            log.error(
                "backend %r did not close within %g s; killed", dispatcher.backend.name, patience
            )
            dispatcher.backend.kill()
            closing.cancel()
        for executor in dispatcher.executors.values():
            executor.shutdown(wait=False, cancel_futures=True)
        if ended:
            await closing  # raises what the backend raised

    def _service_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        log.error("%s ended: %r", task.get_name(), error)
        lost = self.dispatcher.gate.run_lost(
            f"the run ended because its {task.get_name()} failed: {error!r}"
        )
        lost.__cause__ = error
        self.dispatcher.gate.lose(lost)

    async def stop(self) -> None:
        """Cancels the services and everything that runs, and waits until they have ended."""
        tasks = [*self._services, *(record.task for record in self._running if record.task)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def enqueue(self, record: Record) -> None:
        """A sequenced record whose turn in its client's order has come."""
        if record.state is State.HELD:
            record.state = State.QUEUED
        self._lane.put_nowait(record)

    def begin(self, record: Record) -> None:
        """Any other record: runs beside the others."""
        record.task = asyncio.create_task(self._execute(record))

    def lift_pause_of(self, client_id: str) -> None:
        """A pause ends with the lease of the client that asked for it: nobody else would."""
        if client_id not in self._paused_by:
            return
        self._paused_by.discard(client_id)
        if self._paused_by or not self.dispatcher.rules.paused:
            return
        self.begin(
            Record(
                client_id=client_id,
                key=(Stream.CONTROL.value, 0),
                operation=OPERATIONS["resume"],
                request=Resume(),
                digest=None,
                accepted=self.dispatcher.clock.now(),
            )
        )

    def ignore_late(self, record: Record) -> None:
        """A control operation that a newer one has overtaken: answered, not done."""
        record.settle(result=Done(version=self.dispatcher.rules.version))
        self.dispatcher.settled(record)

    async def _serve_lane(self) -> None:
        while True:
            record = await self._lane.get()
            self._check(record, self.dispatcher.clock.now())  # its deadline may just have passed
            if record.done:  # cancelled while it waited: its failure counts where it stood
                if record.error is not None:
                    self.dispatcher.rules.failed(record.operation, record.error, began=False)
                continue
            record.task = asyncio.create_task(self._execute(record))
            await asyncio.wait([record.task])

    async def _execute(self, record: Record) -> None:
        if record.done:
            return
        dispatcher = self.dispatcher
        record.state = State.RUNNING
        record.last_sign = dispatcher.clock.now()
        self._running.add(record)
        try:
            if record.operation.name == "pause":
                self._refuse_pause_of_a_waiting_sync()
                self._paused_by.add(record.client_id)
            elif record.operation.name == "resume":
                self._paused_by.clear()
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
            error = record.ending or as_remote_error(caught)
            self._fail(record, error)
            if isinstance(caught, RunLostError):
                self.dispatcher.backend.kill()
                self.dispatcher.gate.lose(caught)
        else:
            if record.ending is not None:
                self._fail(record, record.ending)
            elif not record.done:
                record.settle(result=result)
        finally:
            self._running.discard(record)
            dispatcher.settled(record)

    def _waiting_delivery(self) -> Record | None:
        """The sync or push that waits for generates to end, while new ones wait for it."""
        for other in self._running:
            if isinstance(other.request, (Push, Sync)) and other.request.in_flight == "wait":
                return other
        return None

    def _refuse_pause_of_a_waiting_sync(self) -> None:
        delivery = self._waiting_delivery()
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
            for other in self._running
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

    # -- the watch ------------------------------------------------------------------------------

    async def _watch(self) -> None:
        clock = self.dispatcher.clock
        while True:
            await clock.sleep(_WATCH_INTERVAL)
            now = clock.now()
            self.dispatcher.gate.expire(now)
            watched = set(self._running)  # also those whose client's lease has ended
            for client in self.dispatcher.gate.clients.values():
                watched.update(client.records())
            for record in watched:
                self._check(record, now)

    def _check(self, record: Record, now: float) -> None:
        if record.done:
            return
        sequenced = record.key[0] == Stream.TRAINING.value
        running = record.state is State.RUNNING
        if record.deadline is not None and now >= record.deadline and not (sequenced and running):
            error = DeadlineExceededError(
                f"the deadline of {record.operation.name} passed "
                + ("while it ran" if running else "before it started")
            )
            if running:
                record.end_early(error)
            else:
                record.settle(error=error)
                self.dispatcher.settled(record)
        elif running and now - record.last_sign >= self.stall_timeout:
            self._stalled(record, sequenced)

    def _stalled(self, record: Record, sequenced: bool) -> None:
        held = record.operation.name == "generate" and (
            self.dispatcher.rules.paused or self._waiting_delivery() is not None
        )
        if held and not record.abort_signal.is_set():
            record.last_sign = self.dispatcher.clock.now()
            return
        error = StalledError(
            f"{record.operation.name} reported nothing for {self.stall_timeout:g} s"
            + (f"; it was last {record.doing}" if record.doing else "")
        )
        if not sequenced:
            record.end_early(error)
            if record.task is not None:
                record.task.cancel()
            return
        # it may still be changing the weights, and nobody can tell: the run ends here
        log.error("%s; the run ends", error)
        self.dispatcher.backend.kill()
        lost = self.dispatcher.gate.run_lost(f"the run ended because {error}")
        lost.__cause__ = error
        record.end_early(lost)
        record.settle(error=lost)
        if record.task is not None:
            record.task.cancel()
        self.dispatcher.gate.lose(lost)


def _called_before(generate: Record, abort: Record) -> bool:
    """Whether an abort of everything means this generate: of the asker's own those called before
    it, however late it arrives; of others' those that were accepted."""
    if generate.client_id != abort.client_id:
        return generate.accepted <= abort.accepted
    return generate.key[1] <= abort.generates_before
