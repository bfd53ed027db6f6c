"""Client: how operations reach the run, a few at a time (imports the contract, link and turns)."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ..messages import Busy, Cancel, Cancelled, Digest, Outcome, Submit
from ..ops import Operation as Row
from ..ops import Stream
from ..requests import Request
from ..submits import submit_of
from .link import Build, Link
from .operation import Call
from .turns import Lane, Turns

log = logging.getLogger("remote_rl.client")

#: how long an answer may wait for the result where nothing else waits for its connection
_LINGER = 0.05
#: how long an answer may wait for room, so that a large request need not be sent again
_PATIENCE = 2.0


class Delivery:
    """Submits operations over `link`, at most `submits` at once, each until the run has it."""

    def __init__(self, link: Link, submits: int) -> None:
        self._link = link
        self._turns = Turns(submits)
        self._news = 0
        #: of generates that an abort must not overtake
        self._on_their_way: set[asyncio.Future[None]] = set()

    async def submit(
        self,
        call: Call,
        row: Row,
        request: Request,
        digest: Digest | None,
        deadline: float | None,
    ) -> Outcome | None:
        """Where the operation stands once the run has it; None where it has ended before that.
        Raises what the run answers, or `UnreachableError`."""

        def build(leased: dict[str, Any]) -> Submit:
            leased["operation"] = row.name
            leased["number"] = call.number
            leased["request"] = request
            leased["digest"] = digest
            leased["generates_before"] = call.generates_before
            leased["deadline"] = deadline
            leased["linger"] = 0.0 if self._turns.waiting else _LINGER
            leased["patience"] = min(_PATIENCE, lease / 4) if lane.narrow else 0.0
            return submit_of(leased)

        lane, lease = self._turns.lane(row.stream_name), self._link.grant.lease_seconds
        if row.sequenced:
            return await self._until_let_in(call, row, lane, build)
        if row.stream is Stream.CONTROL:
            # at once, also where thousands of generates wait for their turn; it is never `Busy`
            if row.name == "abort":
                await self._after_generates()
            outcome: Outcome = await self._link.talk(build, lease)
            return outcome
        if row.stream is not Stream.SAMPLING or lane.refused:
            return await self._until_let_in(call, row, lane, build)
        on_its_way = asyncio.get_running_loop().create_future()
        self._on_their_way.add(on_its_way)
        on_its_way.add_done_callback(self._on_their_way.discard)
        try:
            return await self._until_let_in(call, row, lane, build)
        finally:
            if not on_its_way.done():
                on_its_way.set_result(None)

    async def _until_let_in(self, call: Call, row: Row, lane: Lane, build: Build) -> Outcome | None:
        while True:
            await self._turns.take(lane, call.number)
            try:
                if call.done and row is call.row:  # cancelled, or the run is lost
                    return None  # (an abandon fills the number of a call that has its failure)
                news, patient = self._news, lane.narrow
                answer = await self._link.talk(build, self._link.grant.lease_seconds)
                if isinstance(answer, Outcome):
                    self._turns.let_in(lane)
                    return answer
                if not lane.refused:
                    self._first_refusal(lane, answer)
                lane.narrow_down()
                if patient and news == self._news:  # else there may be room by now
                    self._turns.refuse(lane, call.number, answer.retry_after)
            finally:
                self._turns.give_back(lane, call.number)

    def _first_refusal(self, lane: Lane, busy: Busy) -> None:
        log.info(
            "the run keeps %d bytes for this client, of %d at most: what is submitted waits",
            busy.kept,
            busy.budget,
        )
        if lane is self._turns.lane(Stream.SAMPLING.value):
            for generate in list(self._on_their_way):
                if not generate.done():
                    generate.set_result(None)

    async def cancel(self, call: Call) -> bool:
        """Whether it will never run, or has been told to end; False where its outcome stands."""
        answer: Cancelled = await self._link.talk(
            lambda leased: Cancel(
                stream=call.row.stream_name,
                number=call.number,
                operation=call.row.name,
                **leased,
            ),
            self._link.grant.lease_seconds,
        )
        return answer.cancelled

    def heard(self) -> bool:
        """An outcome has come. Whether submits wait for the room that its acknowledgement makes,
        so that `acknowledge` has to say it."""
        self._news += 1
        if not self._turns.held_up:
            return False
        self._turns.wake()
        return True

    async def acknowledge(self) -> None:
        """Says now what has come, rather than with the next message."""
        await self._link.renew(self._link.grant.lease_seconds)

    async def _after_generates(self) -> None:
        """An abort means all generates that were called before it, and ends only once they have:
        it doesn't overtake those that are on their way. Those that wait for room it may have to
        make room for, so it does overtake them; the run aborts them when they come."""
        if self._on_their_way:
            await asyncio.wait(set(self._on_their_way))
