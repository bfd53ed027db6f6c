"""Dispatcher: a stop that its operator asked for, without losing what is nearly done
(imports errors, ops, gate, record)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ..errors import RunLostError
from ..ops import Stream
from .record import Record, State

if TYPE_CHECKING:
    from .dispatcher import Dispatcher

log = logging.getLogger("remote_rl.dispatcher")

#: for an aborted generate to hand over what it has
_ABORT_SECONDS = 5.0
#: for clients to fetch what ended
_FETCH_SECONDS = 5.0
_LOOK_SECONDS = 0.05


class Stopping:
    """Ends a run in order: nothing new begins, what runs may end within a grace, and its outcomes
    may be fetched. error: what everything else fails with, None before the stop."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._refuses = False
        self.error: RunLostError | None = None

    def refuse_client(self) -> None:
        """Raises once the stop has begun."""
        if self.error is not None:
            raise self.error.copy()

    def refuse_operation(self) -> None:
        """Raises once what ran has ended. Before that, new operations are accepted and held back:
        a client that hears that its run is over gives up what it still waits for."""
        if self._refuses:
            self.refuse_client()

    def holds_back(self, record: Record) -> bool:
        """Whether an operation may not begin any more. Reads and aborts change nothing that lasts,
        and go on."""
        if self.error is None:
            return False
        harmless = record.key[0] == Stream.QUERY.value or record.operation.name == "abort"
        return self._refuses or not harmless

    async def drain(self, grace: float) -> None:
        """Refuses new clients and lets nothing new begin. What runs may end within `grace` seconds;
        then, or at once where generation is paused, generates are ended as by an abort. Once their
        clients have fetched the outcomes, for 5 s at most, everything else fails."""
        dispatcher = self._dispatcher
        self.error = dispatcher.gate.run_lost("the server is being stopped by its operator")
        if dispatcher.rules.paused:
            self._abort_generates()
        await self._until(lambda: not self._running(), grace)
        if self._abort_generates():
            await self._until(lambda: not self._running(Stream.SAMPLING), _ABORT_SECONDS)
        await self._until(self._fetched, _FETCH_SECONDS)
        self._refuses = True
        failed: dict[str, list[Record]] = {}
        for record in list(self._records(State.HELD, State.QUEUED, State.RUNNING)):
            failed.setdefault(record.client_id, []).append(record)
            if record.state is State.RUNNING:
                log.warning("%s did not end within %g s", record.operation.name, grace)
            record.end_early(self.error.copy())
            record.settle(error=self.error.copy())
            dispatcher.settled(record)
        # a client that hears of one gives up the others
        await self._until(
            lambda: all(any(record.delivered for record in own) for own in failed.values()),
            _FETCH_SECONDS,
        )

    def _records(self, *states: State) -> Iterator[Record]:
        for client in self._dispatcher.gate.clients.values():
            for record in client.records():
                if record.state in states:
                    yield record

    def _running(self, stream: Stream | None = None) -> bool:
        return any(
            stream is None or record.key[0] == stream.value
            for record in self._records(State.RUNNING)
        )

    def _fetched(self) -> bool:
        return all(record.delivered for record in self._records(State.DONE))

    def _abort_generates(self) -> bool:
        running = [
            record
            for record in self._records(State.RUNNING)
            if record.key[0] == Stream.SAMPLING.value
        ]
        for record in running:
            record.end_early(None)
        return bool(running)

    async def _until(self, over: Callable[[], bool], seconds: float) -> None:
        clock = self._dispatcher.clock
        end = clock.now() + seconds
        while self._dispatcher.gate.lost is None and not over() and clock.now() < end:
            await clock.sleep(_LOOK_SECONDS)
