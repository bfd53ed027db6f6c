"""Dispatcher: looks at what runs and waits, for leases, deadlines and stalls (imports errors, ops,
record)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import DeadlineExceededError, StalledError, as_remote_error
from .record import Record, State

if TYPE_CHECKING:
    from .runner import Runner

T = TypeVar("T")

#: half of what the clock takes for a gap in which the dispatcher did not run
INTERVAL = 0.5


class Watch:
    """Ends what has waited too long. timeout: seconds that a running operation may be silent."""

    def __init__(self, runner: Runner, timeout: float) -> None:
        self.timeout = timeout
        self._runner = runner
        self._dispatcher = runner.dispatcher

    async def serve(self) -> None:
        """Looks every half second; never returns."""
        clock, gate = self._dispatcher.clock, self._dispatcher.gate
        while True:
            await clock.sleep(INTERVAL)
            now = clock.now()
            gate.expire(now)
            watched = set(self._runner.running)  # also those whose client's lease has ended
            for client in gate.clients.values():
                watched.update(client.records())
            for record in watched:
                self.check(record, now)

    async def start(self, record: Record, starting: Coroutine[Any, Any, None]) -> None:
        """Waits for a backend's start for as long as it shows signs of life."""
        start, clock = asyncio.create_task(contained(starting)), self._dispatcher.clock
        record.last_sign = clock.now()
        try:
            while not (await asyncio.wait([start], timeout=min(INTERVAL, self.timeout)))[0]:
                if clock.now() - record.last_sign >= self.timeout:
                    self._runner.kill()
                    raise self._silence(
                        record, f"the start of backend {self._dispatcher.backend.name!r}"
                    )
                self._refuse_lost()
            await start
            self._refuse_lost()
        except BaseException:
            start.cancel()
            raise

    def _refuse_lost(self) -> None:
        if self._dispatcher.gate.lost is not None:
            raise self._dispatcher.gate.lost.copy()

    def check(self, record: Record, now: float) -> None:
        """Ends the record where its deadline has passed or it has stalled."""
        if record.done:
            return
        sequenced = record.operation.sequenced
        running = record.state is State.RUNNING
        if record.deadline is not None and now >= record.deadline and not (sequenced and running):
            error = DeadlineExceededError(
                f"the deadline of {record.operation.name} passed "
                + ("while it ran" if running else "before it started")
            )
            if not running:
                record.settle(error=error)
                self._dispatcher.settled(record)
                return
            record.end_early(error)
        if running and now - record.last_sign >= self.timeout:
            self._stalled(record, sequenced)

    def _stalled(self, record: Record, sequenced: bool) -> None:
        held = record.operation.name == "generate" and (
            self._dispatcher.rules.paused or self._runner.waiting_delivery() is not None
        )
        if held and not record.told_to_end:
            record.last_sign = self._dispatcher.clock.now()
            return
        error = self._silence(record, record.operation.name)
        if sequenced:
            # it may still be changing the weights, and nobody can tell: the run ends here
            lost = self._dispatcher.gate.run_lost(f"the run ended because {error}")
            lost.__cause__ = error
            self._runner.end_run(lost)
            return
        record.end_early(error)
        record.settle(error=record.ending)  # at once: it may not heed its cancellation either
        if record.task is not None:
            record.task.cancel()
        self._dispatcher.settled(record)

    def _silence(self, record: Record, what: str) -> StalledError:
        return StalledError(
            f"{what} reported nothing for {self.timeout:g} s"
            + (f"; it was last {record.doing}" if record.doing else "")
        )


async def contained(work: Coroutine[Any, Any, T]) -> T:
    """What a backend's coroutine gives or raises; an exit inside it is its failure, since asyncio
    would end the whole loop with it and leave everybody waiting."""
    try:
        return await work
    except (SystemExit, KeyboardInterrupt, GeneratorExit) as leaving:
        raise as_remote_error(leaving) from leaving
