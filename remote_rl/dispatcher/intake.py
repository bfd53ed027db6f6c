"""Dispatcher: operations come in, their outcomes go out (imports the contract, clients, record,
budget)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ..errors import OperationCancelled, ProtocolError, RemoteRLError
from ..messages import Busy, Cancel, Cancelled, Outcome, Submit, Wait, Waited
from ..ops import OPERATIONS, Operation, Stream
from ..requests import Abort
from .budget import request_bytes
from .clients import Client
from .record import Record, State
from .streams import ClientStream

if TYPE_CHECKING:
    from .dispatcher import Dispatcher

_PROGRESS_INTERVAL = 0.25
#: seconds after which a client without room tries again even where it has heard of nothing
_RETRY_AFTER = 5.0


class Intake:
    """Accepts, finds again and cancels the operations of attached clients.

    budget: bytes that are kept for each client.
    """

    def __init__(self, dispatcher: Dispatcher, budget: int) -> None:
        self._dispatcher = dispatcher
        self._budget = budget

    async def submit(self, client: Client, message: Submit) -> Outcome | Busy:
        """Where the operation stands: of a new one after `linger`, of a resent one at once the
        first one's outcome where it is there. `Busy` where there is no room for a new one."""
        row = OPERATIONS.get(message.operation)
        if row is None or not isinstance(message.request, row.request):
            raise ProtocolError(
                f"{message.operation!r} with a {type(message.request).__name__} is no operation"
            )
        stream = client.streams[row.stream_name]
        record = stream.find(message.number, row.name, message.digest)
        if record is None:
            self._dispatcher.stopping.refuse_operation()
            self._dispatcher.capabilities.check(
                row.name, message.request, self._dispatcher.backend.name
            )
            self._dispatcher.backend.model.check(message.request)
            size = request_bytes(message.request)
            if not client.has_room(stream, message.number, size, self._budget):
                if not await self._find_room(client, stream, message, size):
                    return Busy(
                        kept=client.ledger.kept, budget=self._budget, retry_after=_RETRY_AFTER
                    )
                # while this one waited for room, another copy of it may have come in
                record = stream.find(message.number, row.name, message.digest)
            record = record or self._accept(client, row, stream, message, size)
        record.copies += 1
        record.claims += 1
        if record.copies > 1:
            # nobody knows whose answer is heard: from now on, waits bring the outcome as well,
            # until it is acknowledged
            record.delivered = False
        try:
            if not record.done and message.linger:
                # what was begun for it goes first; most small operations end right there
                await asyncio.sleep(0)
            if not record.done and message.linger:
                try:
                    async with asyncio.timeout(message.linger):
                        await record.settled.wait()
                except TimeoutError:
                    pass  # the answer then says "not done yet", and a wait brings the outcome
        finally:
            record.claims -= 1
            if record.done and record.copies > 1:
                client.wake()
        if record.done and record.copies == 1:
            record.delivered = True
        return record.outcome()

    async def _find_room(
        self, client: Client, stream: ClientStream, message: Submit, size: int
    ) -> bool:
        """Whether there is room for a new operation within the patience of its message."""
        loop = asyncio.get_running_loop()
        end = loop.time() + message.patience
        while not client.has_room(stream, message.number, size, self._budget):
            left = end - loop.time()
            if left <= 0:
                return False
            await client.ledger.news(left)
            if not self._dispatcher.gate.holds(client):
                self._dispatcher.gate.client(message)  # raises: says why its lease has ended
            self._dispatcher.stopping.refuse_operation()
            if stream.get(message.number) is not None:
                return True
        return True

    def _accept(
        self, client: Client, row: Operation, stream: ClientStream, message: Submit, size: int
    ) -> Record:
        now = self._dispatcher.clock.now()
        record = Record(
            client_id=message.client_id,
            key=(row.stream_name, message.number),
            operation=row,
            request=message.request,
            digest=message.digest,
            generates_before=message.generates_before,
            accepted=now,
            deadline=None if message.deadline is None else now + message.deadline,
            last_sign=now,
            ledger=client.ledger,
        )
        if size:
            record.keep(size)
        self._dispatcher.statistics.accepted(record)
        for ready in stream.add(record):
            if row.sequenced:
                self._dispatcher.runner.enqueue(ready)
            elif row.stream is Stream.CONTROL and client.is_late_control(row.name, message.number):
                self._dispatcher.runner.ignore_late(ready)
            else:
                self._dispatcher.runner.begin(ready)
        client.ledger.tell()  # what waits for room may now be next in its order
        if isinstance(message.request, Abort):
            client.remember_abort(message.request, message.generates_before)
        elif row.name == "generate" and client.was_aborted(message.number):
            record.end_early(None)
        return record

    async def wait(self, client: Client, message: Wait) -> Waited:
        """What the client hasn't heard yet, as soon as there is anything."""
        loop = asyncio.get_running_loop()
        end = loop.time() + message.timeout
        quiet_until = loop.time() + _PROGRESS_INTERVAL
        while True:
            now = loop.time()
            waited = client.collect(message.cursors, with_progress=now >= quiet_until)
            if waited.outcomes or waited.partials or waited.progress or now >= end:
                return waited
            if not self._dispatcher.gate.holds(client):
                return waited  # whoever asks again is told why
            pause = end - now if now >= quiet_until else min(end, quiet_until) - now
            await client.changed(pause)

    def cancel(self, client: Client, message: Cancel) -> Cancelled:
        """Ends what may still be ended, and keeps the place of what has not arrived."""
        stream = client.streams.get(message.stream)
        row = OPERATIONS.get(message.operation)
        if stream is None or row is None or row.stream.value != message.stream:
            raise ProtocolError(f"there is no {message.operation!r} in stream {message.stream!r}")
        error = OperationCancelled(f"{row.name} was cancelled before it started")
        record = stream.get(message.number)
        if record is None:
            # the cancel overtook the operation: keep its place, so that it can't run later
            self._bury(client, row, message, error)
            return Cancelled(cancelled=True)
        # whoever asks has not heard its outcome, whatever carried it: from now on waits bring it
        record.copies += 1
        record.delivered = False
        if record.state in (State.HELD, State.QUEUED):
            record.settle(error=error)
            client.wake()
            return Cancelled(cancelled=True)
        if record.state is State.RUNNING and row.stream is not Stream.TRAINING:
            record.end_early(OperationCancelled(f"{row.name} was cancelled while it ran"))
            return Cancelled(cancelled=True)
        client.wake()
        return Cancelled(cancelled=isinstance(record.error, OperationCancelled))

    def _bury(self, client: Client, row: Operation, message: Cancel, error: RemoteRLError) -> None:
        stream = client.streams[row.stream.value]
        stream.find(message.number, row.name, None)  # an acknowledged number is a conflict
        record = Record(
            client_id=message.client_id,
            key=(row.stream.value, message.number),
            operation=row,
            request=Abort(),
            digest=None,
            accepted=self._dispatcher.clock.now(),
            tombstone=True,
        )
        record.settle(error=error)
        for ready in stream.add(record):
            if row.stream is Stream.TRAINING:
                self._dispatcher.runner.enqueue(ready)
        client.wake()
