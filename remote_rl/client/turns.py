"""Client: who may submit next (imports asyncio only).

The earliest call of a stream goes first, and a few go at once. Where the run has no room for what a
stream brings (it answers `Busy`), fewer of that stream go, and none before something was heard.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable

#: so many are let in, one after the other, before twice as many go at once again
_EASE = 8
#: seconds, of the pause where nothing is heard for long
_LONGEST_PAUSE = 60.0

#: number in the stream, arrival among all, the future that is the turn
_Ticket = tuple[int, int, "asyncio.Future[None]"]


class Lane:
    """The turns of one stream. window: how many may be under way at once."""

    def __init__(self, slots: int) -> None:
        self.window = slots
        self.slots = slots
        self.refused = False
        self.under_way: set[int] = set()
        self.waiting: list[_Ticket] = []
        self._let_in = 0
        self._asleep_above: int | None = None
        self._pauses = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def narrow(self) -> bool:
        """Whether only one goes at a time, for want of room."""
        return self.refused and self.window == 1

    def admits(self, number: int) -> bool:
        """Whether this number may go now. One that is earlier than all that are under way may
        always: they may be waiting for it."""
        if self._asleep_above is not None and number >= self._asleep_above:
            return False
        if len(self.under_way) < self.window:
            return True
        return self.narrow and number < min(self.under_way)

    def was_let_in(self) -> None:
        """The run accepted one."""
        self._pauses = 0
        self._let_in += 1
        if self.refused and self._let_in >= _EASE:
            self._let_in = 0
            self.window = min(self.slots, 2 * self.window)
            self.refused = self.window < self.slots

    def narrow_down(self) -> None:
        """The run had no room for one: from now on they go one at a time, and wait there."""
        self.window, self.refused, self._let_in = 1, True, 0

    def was_refused(self, number: int, retry_after: float, then: Callable[[], None]) -> None:
        """The run had no room for this one, however long it waited: until `wake`, or a while later,
        only earlier ones go. The pause grows: each try sends the whole request again."""
        self._asleep_above = min(number, self._asleep_above or number)
        pause = min(_LONGEST_PAUSE, retry_after * 2**self._pauses)
        self._pauses = min(self._pauses + 1, 10)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(pause, then)

    def wake(self) -> None:
        """There may be room now."""
        self._asleep_above = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Turns:
    """Hands out `slots` turns among the lanes of a client's streams."""

    def __init__(self, slots: int) -> None:
        self._slots = self._free = slots
        self._lanes: dict[str, Lane] = {}
        #: how many wait for a turn, those that were cancelled and are not yet passed over included
        self.waiting = 0
        self._arrivals = itertools.count()

    def lane(self, stream: str) -> Lane:
        """The lane of this stream."""
        if stream not in self._lanes:
            self._lanes[stream] = Lane(self._slots)
        return self._lanes[stream]

    @property
    def held_up(self) -> bool:
        """Whether submits are waiting for room."""
        return any(lane.refused for lane in self._lanes.values())

    async def take(self, lane: Lane, number: int) -> None:
        """Returns when it is this number's turn; `give_back` ends it."""
        if self._free and not self.waiting and lane.admits(number):
            self._begin(lane, number)
            return
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(lane.waiting, (number, next(self._arrivals), ticket))
        self.waiting += 1
        self._hand_out()
        try:
            await ticket
        except asyncio.CancelledError:
            if ticket.done() and not ticket.cancelled():
                self.give_back(lane, number)
            raise

    def give_back(self, lane: Lane, number: int) -> None:
        """The end of a turn."""
        lane.under_way.discard(number)
        self._free += 1
        if self.waiting:
            self._hand_out()

    def let_in(self, lane: Lane) -> None:
        """The run accepted what had its turn in this lane."""
        lane.was_let_in()
        if self.waiting:
            self._hand_out()

    def refuse(self, lane: Lane, number: int, retry_after: float) -> None:
        """The run had no room for this one, however long it waited."""

        def wake() -> None:
            lane.wake()
            self._hand_out()

        lane.was_refused(number, retry_after, wake)

    def wake(self) -> None:
        """Something has ended, so that there may be room."""
        for lane in self._lanes.values():
            lane.wake()
        self._hand_out()

    def _hand_out(self) -> None:
        while self._free and self.waiting:
            heads = [lane for lane in self._lanes.values() if self._next_number(lane) is not None]
            if not heads:
                return
            lane = min(heads, key=lambda each: each.waiting[0][1])
            number, _, ticket = heapq.heappop(lane.waiting)
            self.waiting -= 1
            self._begin(lane, number)
            ticket.set_result(None)

    def _begin(self, lane: Lane, number: int) -> None:
        lane.under_way.add(number)
        self._free -= 1

    def _next_number(self, lane: Lane) -> int | None:
        while lane.waiting and lane.waiting[0][2].done():  # whoever waited was cancelled
            heapq.heappop(lane.waiting)
            self.waiting -= 1
        if lane.waiting and lane.admits(lane.waiting[0][0]):
            return lane.waiting[0][0]
        return None
