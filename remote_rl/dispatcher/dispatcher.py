"""Dispatcher: one run, one backend, many clients; the single entry is `handle`
(imports the contract and its own modules; no transport, no client)."""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs

from .. import __about__
from ..errors import (
    InvalidRequestError,
    OperationCancelled,
    ProtocolError,
    RemoteRLError,
)
from ..messages import (
    Attach,
    Cancel,
    Cancelled,
    Describe,
    Detach,
    Detached,
    Leased,
    Message,
    Outcome,
    Renew,
    Renewed,
    Submit,
    Wait,
    Waited,
)
from ..ops import ALWAYS_OFFERED, OPERATIONS, Operation, Stream
from ..protocol import PROTOCOL_VERSIONS, Backend, Capabilities
from ..requests import Abort, Generate, Save
from ..run_info import RunInfo
from ..types.fields import is_number
from .capability_checks import check_backend
from .clients import Client
from .clock import Clock, SystemClock
from .context import RunningContext
from .execution import Execution
from .gate import Gate
from .record import Record, State
from .rules import Rules, SeedBook
from .runner import Runner
from .store import Store

_PROGRESS_INTERVAL = 0.25


class Dispatcher:
    """Runs `backend` from `start` to `close`.

    checkpoint_dir: where saves and exports go; None refuses them. lease_seconds: how long a
    silent client keeps its rights. stall_timeout: how long a silent operation is trusted.
    All methods belong to the event loop that called `start`.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        checkpoint_dir: str | Path | None = None,
        lease_seconds: float = 60.0,
        stall_timeout: float = 300.0,
        clock: Clock | None = None,
    ) -> None:
        for name, seconds in (("lease_seconds", lease_seconds), ("stall_timeout", stall_timeout)):
            if not (is_number(seconds) and seconds > 0):
                raise InvalidRequestError(
                    f"{name} must be a number of seconds above 0, not {seconds!r}", field=name
                )
        check_backend(backend)
        self.backend = backend
        self.instance_id = uuid.uuid4().hex
        self.clock = clock or SystemClock()
        self.rules = Rules()
        self.seeds = SeedBook(backend.seed)
        self.store = Store(None if checkpoint_dir is None else Path(checkpoint_dir))
        # apart, so that generates that block can't keep training from a thread
        self.executors = {
            Stream.TRAINING.value: ThreadPoolExecutor(2, "remote_rl training"),
            Stream.SAMPLING.value: ThreadPoolExecutor(32, "remote_rl sampling"),
        }
        self.execution = Execution(backend, self.rules, self.seeds, self.store, self.info)
        self.runner = Runner(self, stall_timeout)
        self.gate = Gate(
            instance_id=self.instance_id,
            describe=self.info,
            lease_seconds=lease_seconds,
            clock=self.clock,
            rules=self.rules,
            seeds=self.seeds,
            store=self.store,
            client_ended=self.runner.lift_pause_of,
        )

    # -- life -----------------------------------------------------------------------------------

    async def start(self, on_progress: Callable[[str], None] | None = None) -> None:
        """Starts the backend; `on_progress` hears what it is doing. A failed start is closed."""
        record = Record(
            client_id="dispatcher",
            key=("query", 0),
            operation=OPERATIONS["info"],
            request=Abort(),
            digest=None,
            accepted=self.clock.now(),
        )

        def hear() -> None:
            if on_progress is not None and record.progress is not None:
                on_progress(record.progress.what)

        try:
            await self.runner.watch_start(record, self.backend.start(self._context(record, hear)))
        except BaseException:
            await self.runner.close_backend()
            raise
        self.runner.start()

    async def close(self) -> None:
        """Ends everything: what runs is cancelled, what waits fails, the backend is closed."""
        self.gate.lose(self.gate.run_lost("the run was closed"))
        await self.runner.stop()
        await self.runner.close_backend()

    # -- messages -------------------------------------------------------------------------------

    async def handle(self, message: Message) -> Any:
        """The one entry: a message of a client, answered or refused with an error of the tree."""
        if isinstance(message, Describe):
            return self.info()
        if isinstance(message, Attach):
            return self.gate.attach(message)
        if not isinstance(message, Leased):
            raise ProtocolError(f"{type(message).__name__} is no message that a client sends")
        if isinstance(message, Detach) and self.gate.has_left(message):
            return Detached()
        client = self.gate.client(message)
        client.acknowledge(message.acknowledged)
        if isinstance(message, Submit):
            return await self._submit(client, message)
        if isinstance(message, Wait):
            return await self._wait(client, message)
        if isinstance(message, Cancel):
            return self._cancel(client, message)
        if isinstance(message, Detach):
            return self.gate.detach(client)
        if isinstance(message, Renew):
            return Renewed(lease_seconds=self.gate.leases.seconds)
        raise ProtocolError(f"{type(message).__name__} is no message that a client sends")

    def info(self) -> RunInfo:
        """What the run is, now."""
        return RunInfo(
            instance_id=self.instance_id,
            backend=self.backend.name,
            model=self.backend.model,
            capabilities=self.capabilities,
            protocol_versions=PROTOCOL_VERSIONS,
            software=f"remote_rl {__about__.__version__}",
            versions=self.execution.versions(),
            paused=self.rules.paused,
            pristine=self.rules.pristine,
            checkpoint_dir=self.store.available,
            driver=self.gate.leases.driver is not None,
            lost=None if self.gate.lost is None else self.gate.lost.message,
        )

    @functools.cached_property
    def capabilities(self) -> Capabilities:
        """The backend's, with what the dispatcher offers whatever the backend."""
        declared = self.backend.capabilities
        return attrs.evolve(declared, operations=declared.operations | ALWAYS_OFFERED)

    # -- operations -----------------------------------------------------------------------------

    async def _submit(self, client: Client, message: Submit) -> Outcome:
        row = OPERATIONS.get(message.operation)
        if row is None or not isinstance(message.request, row.request):
            raise ProtocolError(
                f"{message.operation!r} with a {type(message.request).__name__} is no operation"
            )
        stream = client.streams[row.stream.value]
        record = stream.find(message.number, row.name, message.digest)
        if record is None:
            self.capabilities.check(row.name, message.request, self.backend.name)
            self.backend.model.check(message.request)
            record = self._accept(client, row, message)
        record.claims += 1
        try:
            if not record.done and message.linger:
                try:
                    await asyncio.wait_for(record.settled.wait(), message.linger)
                except TimeoutError:
                    pass  # the answer then says "not done yet", and a wait brings the outcome
        finally:
            record.claims -= 1
        record.delivered = record.delivered or record.done
        return record.outcome()

    def _accept(self, client: Client, row: Operation, message: Submit) -> Record:
        now = self.clock.now()
        record = Record(
            client_id=message.client_id,
            key=(row.stream.value, message.number),
            operation=row,
            request=message.request,
            digest=message.digest,
            generates_before=message.generates_before,
            accepted=now,
            deadline=None if message.deadline is None else now + message.deadline,
            last_sign=now,
        )
        for ready in client.streams[row.stream.value].add(record):
            if row.stream is Stream.TRAINING:
                self.runner.enqueue(ready)
            elif row.stream is Stream.CONTROL and client.is_late_control(row.name, message.number):
                self.runner.ignore_late(ready)
            else:
                self.runner.begin(ready)
        return record

    async def _wait(self, client: Client, message: Wait) -> Waited:
        loop = asyncio.get_running_loop()
        end = loop.time() + message.timeout
        quiet_until = loop.time() + _PROGRESS_INTERVAL
        while True:
            now = loop.time()
            waited = client.collect(message.cursors, with_progress=now >= quiet_until)
            if waited.outcomes or waited.partials or waited.progress or now >= end:
                return waited
            if not self.gate.holds(client):
                return waited  # whoever asks again is told why
            pause = end - now if now >= quiet_until else min(end, quiet_until) - now
            await client.changed(pause)

    def _cancel(self, client: Client, message: Cancel) -> Cancelled:
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
        if record.state in (State.HELD, State.QUEUED):
            record.settle(error=error)
            client.wake()
            return Cancelled(cancelled=True)
        if record.state is State.RUNNING and row.stream is not Stream.TRAINING:
            record.end_early(OperationCancelled(f"{row.name} was cancelled while it ran"))
            return Cancelled(cancelled=True)
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
            accepted=self.clock.now(),
            tombstone=True,
        )
        record.settle(error=error)
        for ready in stream.add(record):
            if row.stream is Stream.TRAINING:
                self.runner.enqueue(ready)
        client.wake()

    # -- for the runner -------------------------------------------------------------------------

    def context_of(self, record: Record) -> RunningContext:
        """The context of a record that begins to run."""
        client = self.gate.clients.get(record.client_id)
        context = self._context(record, client.wake if client is not None else lambda: None)
        if isinstance(record.request, Save) and client is not None:
            # its own generates as of the call: those called later have not been drawn for it
            before = client.seed_base + record.generates_before
            context.counters = {**self.seeds.counters, client.lease.ordinal: before}
        if isinstance(record.request, Generate):
            given = record.request.params.seed
            if given is not None:
                context.seed = given
            elif client is not None:
                count = client.seed_base + record.key[1]
                context.seed = self.seeds.seed(client.lease.ordinal, count)
        return context

    def _context(self, record: Record, wake: Callable[[], None]) -> RunningContext:
        return RunningContext(
            record=record,
            clock=self.clock,
            executor=self.executors.get(record.key[0], self.executors[Stream.SAMPLING.value]),
            loop=asyncio.get_running_loop(),
            wake_client=wake,
            version=self.rules.version,
            next_version=self.rules.next_version,
        )

    def settled(self, record: Record) -> None:
        """After a record's outcome became final: seeds follow a load, the client wakes."""
        if record.operation.name in ("load", "reset") and record.error is None:
            for client in self.gate.clients.values():
                submitted = client.streams[Stream.SAMPLING.value].highest
                client.seed_base = self.seeds.base(client.lease.ordinal, submitted)
        holder = self.gate.clients.get(record.client_id)
        if holder is not None:
            holder.wake()
