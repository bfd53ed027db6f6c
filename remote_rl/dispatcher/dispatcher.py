"""Dispatcher: one run, one backend, many clients; the single entry is `handle`
(imports the contract and its own modules; no transport, no client)."""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from .. import __about__
from ..errors import InvalidRequestError, ProtocolError, RemoteRLError, RunLostError
from ..messages import (
    Attach,
    Busy,
    Cancel,
    Describe,
    Detach,
    Detached,
    Leased,
    Message,
    Observe,
    Outcome,
    Renew,
    Renewed,
    Submit,
    Wait,
)
from ..ops import ALWAYS_OFFERED, OPERATIONS, Stream
from ..protocol import PROTOCOL_VERSIONS, Backend, Capabilities
from ..requests import Abort, Generate, Save
from ..run_info import RunInfo, RunStatus
from ..types.fields import is_number
from .budget import DEFAULT_BUDGET
from .capability_checks import check_backend
from .clock import AwakeClock, Clock, SystemClock
from .context import RunningContext
from .execution import Execution
from .gate import Gate
from .intake import Intake
from .record import Record
from .rules import Rules, SeedBook
from .runner import Runner
from .statistics import Statistics
from .stopping import Stopping
from .store import Store
from .threads import Threads

_SAMPLING = Stream.SAMPLING.value
_SOFTWARE = f"remote_rl {__about__.__version__}"


class Dispatcher:
    """Runs `backend` from `start` to `close`.

    checkpoint_dir: where saves and exports go; None refuses them. lease_seconds: how long a
    silent client keeps its rights. stall_timeout: how long a silent operation is trusted.
    budget_bytes: what is kept for each client at most, in bytes of arrays: requests that have not
    ended and results that are not acknowledged. Beyond it a client's submits wait.
    All methods belong to the event loop that called `start`.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        checkpoint_dir: str | Path | None = None,
        lease_seconds: float = 60.0,
        stall_timeout: float = 300.0,
        budget_bytes: int = DEFAULT_BUDGET,
        clock: Clock | None = None,
    ) -> None:
        for name, seconds in (("lease_seconds", lease_seconds), ("stall_timeout", stall_timeout)):
            if not (is_number(seconds) and seconds > 0):
                raise InvalidRequestError(
                    f"{name} must be a number of seconds above 0, not {seconds!r}", field=name
                )
        if type(budget_bytes) is not int or budget_bytes < 1:
            raise InvalidRequestError(
                f"budget_bytes must be a whole number of bytes above 0, not {budget_bytes!r}",
                field="budget_bytes",
            )
        check_backend(backend)
        self.backend = backend
        self.instance_id = uuid.uuid4().hex
        self.clock = AwakeClock(clock or SystemClock())
        self.rules = Rules()
        self.statistics = Statistics(self.clock, lambda: self.rules.version)
        self.stopping = Stopping(self)
        self.seeds = SeedBook(backend.seed)
        self.store = Store(None if checkpoint_dir is None else Path(checkpoint_dir))
        # apart, so that generates that block can't keep training from a thread
        self.executors = {
            Stream.TRAINING.value: Threads(2, "remote_rl training"),
            _SAMPLING: Threads(32, "remote_rl sampling"),
        }
        self.execution = Execution(backend, self.rules, self.seeds, self.store, self.info)
        self.runner = Runner(self, stall_timeout)
        self.intake = Intake(self, budget_bytes)
        self.gate = Gate(
            instance_id=self.instance_id,
            describe=self.info,
            lease_seconds=lease_seconds,
            clock=self.clock,
            rules=self.rules,
            seeds=self.seeds,
            store=self.store,
            client_ended=self.runner.pauses.client_ended,
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
            await self.runner.watch.start(record, self.backend.start(self._context(record, hear)))
        except BaseException:
            await self.runner.close_backend()
            raise
        self.runner.start()

    async def drain(self, grace: float) -> None:
        """A stop in order, before `close`: `Stopping.drain`."""
        await self.stopping.drain(grace)

    @property
    def attached(self) -> int:
        """How many clients hold a lease."""
        return len(self.gate.clients)

    async def lost(self) -> RunLostError:
        """Waits until the run is over, and says why."""
        await self.gate.over.wait()
        assert self.gate.lost is not None
        return self.gate.lost

    async def close(self) -> None:
        """Ends everything: what runs is cancelled, what waits fails, the backend is closed."""
        self.gate.lose(self.stopping.error or self.gate.run_lost("the run was closed"))
        await self.runner.stop()
        await self.runner.close_backend()

    # -- messages -------------------------------------------------------------------------------

    async def handle(self, message: Message) -> Any:
        """The one entry: a message of a client, answered or refused with an error of the tree."""
        if isinstance(message, Submit):
            return await self._submit(message)
        if isinstance(message, Describe):
            return self.info()
        if isinstance(message, Observe):
            return self.status()
        if isinstance(message, Attach):
            self.stopping.refuse_client()
            return self.gate.attach(message)
        if not isinstance(message, Leased):
            raise ProtocolError(f"{type(message).__name__} is no message that a client sends")
        if isinstance(message, Detach) and self.gate.has_left(message):
            return Detached()
        client = self.gate.client(message)
        client.acknowledge(message.acknowledged)
        if isinstance(message, Wait):
            return await self.intake.wait(client, message)
        if isinstance(message, Cancel):
            return self.intake.cancel(client, message)
        if isinstance(message, Detach):
            return self.gate.detach(client)
        if isinstance(message, Renew):
            return Renewed(lease_seconds=self.gate.leases.seconds)
        raise ProtocolError(f"{type(message).__name__} is no message that a client sends")

    async def _submit(self, message: Submit) -> Outcome | Busy:
        client = self.gate.client(message)
        try:
            if message.acknowledged:
                client.acknowledge(message.acknowledged)
            answer = await self.intake.submit(client, message)
        except RemoteRLError as error:  # the operation was not accepted
            if message.operation in OPERATIONS:  # names that a client makes up are not kept
                self.statistics.refused(message.operation, error)
            raise
        if isinstance(answer, Busy):
            self.statistics.had_no_room()
        return answer

    def info(self) -> RunInfo:
        """What the run is, now."""
        return RunInfo(
            instance_id=self.instance_id,
            backend=self.backend.name,
            model=self.backend.model,
            capabilities=self.capabilities,
            protocol_versions=PROTOCOL_VERSIONS,
            software=_SOFTWARE,
            versions=self.execution.versions(),
            paused=self.rules.paused,
            pristine=self.rules.pristine,
            checkpoint_dir=self.store.available,
            driver=self.gate.leases.driver is not None,
            lost=None if self.gate.lost is None else self.gate.lost.message,
            devices=getattr(self.backend, "devices", None),
        )

    def status(self) -> RunStatus:
        """How the run is and what it has done, now."""
        statistics = self.statistics
        recent_mean, recent_max = statistics.recent()
        return RunStatus(
            instance_id=self.instance_id,
            backend=self.backend.name,
            model=self.backend.model.name,
            software=_SOFTWARE,
            uptime=statistics.uptime(),
            versions=self.execution.versions(),
            driver=self.gate.leases.driver is not None,
            clients=self.attached,
            paused=self.rules.paused,
            stopping=self.stopping.error is not None,
            lost=None if self.gate.lost is None else self.gate.lost.message,
            kept_bytes=sum(client.ledger.kept for client in self.gate.clients.values()),
            busy=statistics.busy,
            operations=tuple(statistics.operations()),
            generated_samples=statistics.generated_samples,
            generated_tokens=statistics.generated_tokens,
            staleness=statistics.staleness(),
            recent_mean=recent_mean,
            recent_max=recent_max,
            last_failure=statistics.last_failure(),
        )

    @functools.cached_property
    def capabilities(self) -> Capabilities:
        """The backend's, with what the dispatcher offers whatever the backend."""
        declared = self.backend.capabilities
        return attrs.evolve(declared, operations=declared.operations | ALWAYS_OFFERED)

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
            executor=self.executors.get(record.key[0], self.executors[_SAMPLING]),
            loop=asyncio.get_running_loop(),
            wake_client=wake,
            on_sample=self.statistics.sample_ended,
            on_loss=self.runner.engine_lost,
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
