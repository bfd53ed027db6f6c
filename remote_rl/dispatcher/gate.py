"""Dispatcher: who is attached, how they come and how they go
(imports the contract, leases, clients, rules, seeds, store)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from ..errors import (
    InvalidRequestError,
    ProtocolError,
    RemoteRLError,
    RunLostError,
)
from ..messages import Attach, Detach, Detached, Grant, Leased, Occupied
from ..ops import Stream
from ..protocol import PROTOCOL_VERSIONS
from ..requests import RESERVED_NAMES
from ..run_info import RunInfo
from .clients import Client
from .clock import Clock
from .leases import Lease, Leases
from .record import State
from .rules import Rules, SeedBook
from .store import Store

log = logging.getLogger("remote_rl.dispatcher")


class Gate:
    """The attached clients of one run, and the end of it for all of them.

    instance_id: of the run. describe: gives its `RunInfo`. client_ended: hears who has left.
    lost: why the run is over, once it is; `over` is set then.
    """

    def __init__(
        self,
        *,
        instance_id: str,
        describe: Callable[[], RunInfo],
        lease_seconds: float,
        clock: Clock,
        rules: Rules,
        seeds: SeedBook,
        store: Store,
        client_ended: Callable[[str], None],
    ) -> None:
        self.instance_id = instance_id
        self.leases = Leases(lease_seconds)
        self.clients: dict[str, Client] = {}
        self.lost: RunLostError | None = None
        self.over = asyncio.Event()
        self._describe = describe
        self._clock = clock
        self._rules = rules
        self._seeds = seeds
        self._store = store
        self._client_ended = client_ended

    def client(self, message: Leased) -> Client:
        """The sender, its lease renewed; raises where it has no right to the run."""
        if message.instance_id != self.instance_id:
            raise RunLostError(
                "the server was restarted, and the run that this session held is gone; connect "
                f"again, with start= {self._store.start_hint()}",
                last_checkpoint=self._store.latest(),
            )
        if self.lost is not None:
            raise self.lost.copy()
        now = self._clock.now()
        self.expire(now)  # a lease that has run out is not renewed by a late message
        self.leases.renew(message.client_id, now)
        return self.clients[message.client_id]

    def has_left(self, message: Detach) -> bool:
        """Whether the sender held a lease of this run that has ended."""
        return message.instance_id == self.instance_id and self.leases.ended(message.client_id)

    def holds(self, client: Client) -> bool:
        """Whether the client's lease and the run go on."""
        return self.lost is None and self.clients.get(client.lease.client_id) is client

    def run_lost(self, reason: str) -> RunLostError:
        """The error that says why the run is over and where to go on."""
        return RunLostError(
            f"{reason}; connect to a new run with start= {self._store.start_hint()}",
            last_checkpoint=self._store.latest(),
        )

    def with_checkpoint(self, error: RunLostError) -> RunLostError:
        """A backend's own such error, which can't know where to go on, with that said."""
        if error.details.get("last_checkpoint") is not None:
            return error
        told = self.run_lost(error.message)
        told.details = {**error.details, **told.details}
        told.__cause__ = error.__cause__
        return told

    def lose(self, error: RunLostError) -> None:
        """The run is over: every operation and every later message fails with `error`."""
        if self.lost is None:
            self.lost = error
            self.over.set()
        for client in self.clients.values():
            for record in client.records():
                if not record.done:  # one that runs is cancelled elsewhere, and not waited for
                    record.end_early(self.lost.copy())
                    record.settle(error=self.lost.copy())
            client.wake()

    def attach(self, message: Attach) -> Grant | Occupied:
        """A lease as driver or member, or how long another driver's may last."""
        if not set(message.protocol_versions) & set(PROTOCOL_VERSIONS):
            raise ProtocolError(
                f"the client speaks protocol {list(message.protocol_versions)} and the server "
                f"{list(PROTOCOL_VERSIONS)}; install the same remote-rl on both sides"
            )
        if message.instance_id is not None and message.instance_id != self.instance_id:
            raise RunLostError(
                "the handle is of a run that is gone; connect again, with start= "
                f"{self._store.start_hint()}",
                last_checkpoint=self._store.latest(),
            )
        if self.lost is not None:
            raise self.lost.copy()
        now = self._clock.now()
        self.expire(now)
        self._check_model(message)
        if message.epoch is not None:
            if message.start is not None or message.takeover:
                raise InvalidRequestError("start and takeover are the driver's, not a handle's")
            lease = self.leases.attach_member(message.client_id, message.epoch, now)
            return self._grant(lease, None)
        needs_start = self._needs_start(message)
        before = self.leases.held()
        answer = self.leases.attach_driver(message.client_id, now, message.takeover)
        if isinstance(answer, Occupied):
            return answer
        held = {lease.client_id for lease in self.leases.held()}
        self._ended(lease for lease in before if lease.client_id not in held)
        return self._grant(answer, needs_start)

    def _check_model(self, message: Attach) -> None:
        model = self._describe().model.name
        if message.model is not None and message.model != model:
            raise InvalidRequestError(
                f"the run's model is {model!r}, not {message.model!r}; start a "
                "server with that model, or leave model out"
            )

    def _needs_start(self, message: Attach) -> str | None:
        start = message.start
        if start is not None and start not in RESERVED_NAMES:
            self._store.checkpoint(start)
            return start
        if start == "reference":
            raise InvalidRequestError("start must be 'base', 'current' or a checkpoint's name")
        if self._rules.pristine:
            return None
        if start is None:
            if message.client_id in self.clients:  # asked again: it was let in before
                return None
            raise InvalidRequestError(
                "the run has been trained or loaded before, so say where to begin: start='base', "
                "start='current' or the name of a checkpoint"
            )
        return start

    def _grant(self, lease: Lease, needs_start: str | None) -> Grant:
        if lease.client_id not in self.clients:
            client = self.clients[lease.client_id] = Client(lease)
            client.seed_base = self._seeds.base(lease.ordinal)
            self._log(lease, "attached")
        return Grant(
            client_id=lease.client_id,
            instance_id=self.instance_id,
            epoch=lease.epoch,
            role=lease.role,
            lease_seconds=self.leases.seconds,
            needs_start=needs_start,
            info=self._describe(),
        )

    def detach(self, client: Client) -> Detached:
        """Ends the client's lease, with a driver's its whole epoch."""
        self._ended(self.leases.end(client.lease.client_id, "it detached"))
        return Detached()

    def expire(self, now: float) -> None:
        """Ends the leases that have run out."""
        ended = self.leases.expire(now)
        if ended:
            self._ended(ended)

    def _ended(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            client = self.clients.pop(lease.client_id, None)
            if client is not None:
                self._log(lease, "ended", self.leases.reason(lease.client_id))
                self._drop(client, self.leases.refusal(lease.client_id))
                self._client_ended(lease.client_id)

    def _log(self, lease: Lease, event: str, why: str = "") -> None:
        log.info(
            "%s %s %s epoch %d%s",
            lease.role,
            lease.client_id,
            {"attached": "joined", "ended": "left"}[event],
            lease.epoch,
            f": {why}" if why else "",
            extra={
                "event": event,
                "client": lease.client_id,
                "role": lease.role,
                "epoch": lease.epoch,
                "reason": why,
            },
        )

    def _drop(self, client: Client, error: RemoteRLError) -> None:
        for record in client.records():
            if record.state in (State.HELD, State.QUEUED):
                record.settle(error=error.copy())
            elif record.state is State.RUNNING and record.key[0] != Stream.TRAINING.value:
                record.end_early(error.copy())
        client.wake()
