"""Mock backend: the sampler and what acts on it between tokens (imports generation, config,
journal, and the contract)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs

from remote_rl.errors import BackendError
from remote_rl.protocol import OperationContext
from remote_rl.requests import FinishSession, Generate, InFlight, Pause, ResetPrefixCache, Resume
from remote_rl.types import Generation, Sample

from .config import MockConfig
from .generation import Flight, Served
from .journal import Journal, first_of, pause

#: seconds between two signs of life of a delivery that waits for generates
HEARTBEAT_SECONDS = 1.0


@attrs.define(eq=False)
class _Seat:
    """A flight on board. leave: it is to end early. left: it has ended."""

    flight: Flight
    leave: asyncio.Event = attrs.field(factory=asyncio.Event)
    left: asyncio.Event = attrs.field(factory=asyncio.Event)


class Sampler:
    """Serves its own copy of the weights; implements `protocol.Sampling`."""

    def __init__(self, config: MockConfig, journal: Journal) -> None:
        self._config = config
        self._journal = journal
        self._served: Served | None = None
        self._seats: set[_Seat] = set()
        self._running = asyncio.Event()
        self._running.set()
        self._boarding = asyncio.Event()
        self._boarding.set()

    # -- weights ------------------------------------------------------------------------------

    @property
    def served(self) -> Served:
        """What the next token is drawn from."""
        if self._served is None:
            raise BackendError("the mock backend was not started")
        return self._served

    @property
    def version(self) -> tuple[int | None, int | str | None]:
        """Version and label of what it serves; None before the start."""
        return (None, None) if self._served is None else (self._served.version, self._served.label)

    async def deliver(self, served: Served, in_flight: InFlight, context: OperationContext) -> None:
        """Takes new weights over from the next token on; what flies goes on with them, or has
        ended before."""
        if in_flight == "keep":
            self._served = served
            return
        async with self._nobody_boards():
            if in_flight == "abort":
                for seat in self._seats:
                    seat.leave.set()
            while self._seats:
                what = f"waiting for {len(self._seats)} generates to end"
                context.progress(0, None, what if self._running.is_set() else f"{what}, paused")
                waits = [asyncio.ensure_future(seat.left.wait()) for seat in self._seats]
                await first_of(waits, timeout=HEARTBEAT_SECONDS)
            self._served = served

    def replace(self, served: Served) -> None:
        """At the start and at a reset: new weights at once."""
        self._served = served

    @asynccontextmanager
    async def _nobody_boards(self) -> AsyncIterator[None]:
        self._boarding.clear()
        try:
            yield
        finally:
            self._boarding.set()

    # -- operations ---------------------------------------------------------------------------

    async def generate(self, request: Generate, context: OperationContext) -> Generation:
        """Draws the samples of a request; randomness depends on seed, prompt, sample and position
        only, so neither on what else is in flight nor on timing."""
        async with self._journal.operation("generate", request, context):
            flight = Flight(request, context.seed, self._config.window, self._config.ends)
            while not self._boarding.is_set() and not context.cancelled:
                await self._until(self._boarding, context)
            seat = _Seat(flight)
            self._seats.add(seat)
            try:
                await self._fly(seat, context)
            finally:
                self._seats.discard(seat)
                seat.left.set()
            return flight.generation()

    async def _fly(self, seat: _Seat, context: OperationContext) -> None:
        flight = seat.flight
        while not flight.done:
            await pause(self._config.seconds("token"), context)
            if context.cancelled or seat.leave.is_set():
                self._tell(flight, flight.abort(self.served), context)
            elif not self._running.is_set():
                await self._until(self._running, context, seat.leave)
            else:
                ended = await context.thread(
                    flight.advance, lambda: self.served, lambda: self._wanted(seat, context)
                )
                self._tell(flight, ended, context)

    def _wanted(self, seat: _Seat, context: OperationContext) -> bool:
        """Whether the event loop has something to do between two tokens; asked off the loop."""
        return (
            self._config.seconds("token") > 0
            or not self._running.is_set()
            or seat.leave.is_set()
            or context.cancelled
        )

    def _tell(self, flight: Flight, ended: list[Sample], context: OperationContext) -> None:
        for sample in ended:
            context.emit(sample)
        context.progress(flight.finished, len(flight.samples), "generating")

    async def _until(
        self, event: asyncio.Event, context: OperationContext, *others: asyncio.Event
    ) -> None:
        events = (event, context.abort_signal, *others)
        await first_of([asyncio.ensure_future(each.wait()) for each in events])

    async def pause(self, request: Pause, context: OperationContext) -> None:
        """Holds every generate at its next token."""
        async with self._journal.operation("pause", request, context):
            self._running.clear()

    async def resume(self, request: Resume, context: OperationContext) -> None:
        """Lets them go on."""
        async with self._journal.operation("resume", request, context):
            self._running.set()

    async def reset_prefix_cache(
        self, request: ResetPrefixCache, context: OperationContext
    ) -> None:
        """There is no cache; the call is in the log."""
        async with self._journal.operation("reset_prefix_cache", request, context):
            pass

    async def finish_session(self, request: FinishSession, context: OperationContext) -> None:
        """Sessions hold nothing here; the call is in the log."""
        async with self._journal.operation("finish_session", request, context):
            pass
