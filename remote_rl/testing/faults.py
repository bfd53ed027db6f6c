"""Testing: a transport that loses, repeats, delays, reorders and cuts messages, from a seed
(imports messages, wire, types' fields and the HTTP transport).

    faults = Faults(seed=7, lose_request=0.02, lose_response=0.02, duplicate=0.02)
    with connect("http://127.0.0.1:7700", wrap_transport=faults.wrap) as rl:
        ...  # everything goes on as without faults
    print(faults.injected)
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import attrs

from ..errors import InvalidRequestError, RemoteRLError
from ..messages import Cancel, ConnectionLost, Digest, Message, Submit, Transport
from ..ops import OPERATIONS
from ..requests import Request
from ..transports.http import Cut, HttpTransport
from ..types.fields import integer, number, strict
from ..wire import digest

#: at most one of them happens to a message
LOSSES = ("lose_request", "lose_response", "cut_request", "cut_response")
#: a duplicate that comes late comes after at most so many later messages
_LATEST_DUPLICATE = 20
#: seconds for which a duplicate may occupy a connection, and a close waits for duplicates
_DUPLICATE_SECONDS = 1.0


def _probability() -> Any:
    return attrs.field(default=0.0, converter=_plain, validator=number(minimum=0, maximum=1))


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


@strict
@attrs.frozen(kw_only=True, eq=False)
class Faults:
    """What goes wrong between a client and its run; `wrap` is for `connect(wrap_transport=)`.

    Each is a probability per message, from 0 to 1, of every message that the client sends: those
    of attaching, waiting, renewing and detaching too. The four losses exclude each other, so they
    come to at most 1; the others come on top of them.

    lose_request: it never arrives. lose_response: it is executed and the answer is lost.
    cut_request, cut_response: over HTTP the connection breaks in mid-body, after a random share of
    the request's or the answer's bytes; in process they are a lost request and a lost response.
    Of all four the client sees `ConnectionLost`.
    duplicate: it is delivered a second time, at once or after up to 20 later messages, and the
    second answer is dropped, whatever it is.
    delay: it, or its answer, is late by up to `delay_seconds`.
    reorder: it is held until a later message has been answered; where none comes, until
    `reorder_seconds` have passed.

    What happens to the n-th sending of a message (an operation's number, a cancel of one, the k-th
    wait) depends on the seed alone. In which order messages meet, and how many waits and resends
    there are, depends on time as well.
    """

    seed: int = attrs.field(default=0, validator=integer(minimum=0))
    lose_request: float = _probability()
    lose_response: float = _probability()
    duplicate: float = _probability()
    delay: float = _probability()
    delay_seconds: float = attrs.field(default=0.01, validator=number(minimum=0, maximum=60))
    reorder: float = _probability()
    reorder_seconds: float = attrs.field(default=0.05, validator=number(minimum=0, maximum=60))
    cut_request: float = _probability()
    cut_response: float = _probability()
    _counters: list[Counter[str]] = attrs.field(factory=list, init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        total = sum(getattr(self, kind) for kind in LOSSES)
        if total > 1:
            raise InvalidRequestError(
                f"Faults: {', '.join(LOSSES)} exclude each other and come to {total:g}; they may "
                "come to 1 at most"
            )

    def wrap(self, inner: Transport) -> FaultyTransport:
        """A transport that does to `inner`'s messages what is said here. Each begins anew with the
        seed: two of them do the same to the same messages."""
        transport = FaultyTransport(inner, self)
        self._counters.append(transport.injected)
        return transport

    @property
    def injected(self) -> Counter[str]:
        """How often each fault was injected so far, by its name, into all that was wrapped.
        "duplicate_refused": the duplicates that were answered with an error."""
        return sum(self._counters, Counter())


@attrs.frozen
class _Plan:
    """What happens to one message. loss: one of LOSSES or None. share: of the body before a cut.
    duplicate: after how many later messages it comes again, None never.
    delay: seconds or None. late_answer: the delay is the answer's."""

    loss: str | None
    share: float
    duplicate: int | None
    delay: float | None
    late_answer: bool
    reorder: bool


@attrs.define(eq=False)
class _Held:
    """A message that waits for `left` messages later than `place` to be answered."""

    place: int
    left: int
    free: asyncio.Event = attrs.field(factory=asyncio.Event)


class FaultyTransport:
    """Carries messages over `inner` and does to them what `faults` says.

    injected: how often each fault was, by its name. Used from one event loop.
    """

    def __init__(self, inner: Transport, faults: Faults) -> None:
        self.injected: Counter[str] = Counter()
        self._inner = inner
        self._faults = faults
        self._sent: Counter[str] = Counter()
        self._places = 0
        self._closing = False
        self._held: list[_Held] = []
        self._duplicates: set[asyncio.Task[None]] = set()

    @property
    def target(self) -> str:
        """That of `inner`."""
        return self._inner.target

    @property
    def submits(self) -> int:
        """That of `inner`."""
        return self._inner.submits

    def digest(self, request: Request) -> Digest:
        """Never None, since anything may be sent twice here: where `inner` has none, the wire's."""
        return self._inner.digest(request) or digest(request)

    async def call(self, message: Message, timeout: float) -> Any:
        """The reply of `inner`, or `ConnectionLost` where the message or its answer was lost."""
        plan = self._plan(message)
        self._places += 1
        place = self._places
        if plan.duplicate is not None:
            self._duplicate(message, timeout, place, plan.duplicate)
        if plan.reorder:
            self.injected["reorder"] += 1
            await self._overtaken(_Held(place, 1), self._faults.reorder_seconds)
        if plan.delay is not None and not plan.late_answer:
            await self._be_late(plan.delay)
        try:
            return await self._carry(message, timeout, plan)
        finally:
            self._answered(place)
            if plan.delay is not None and plan.late_answer:
                await self._be_late(plan.delay)

    async def close(self) -> None:
        """Delivers the duplicates that still wait, ends what is under way after a second, and
        closes `inner`."""
        self._closing = True
        for held in self._held:
            held.free.set()
        duplicates = set(self._duplicates)
        if duplicates:
            await asyncio.wait(duplicates, timeout=_DUPLICATE_SECONDS)
        for task in duplicates:
            task.cancel()
        await asyncio.gather(*duplicates, return_exceptions=True)
        await self._inner.close()

    def _plan(self, message: Message) -> _Plan:
        name = _name(message)
        self._sent[name] += 1
        draw = random.Random(f"{self._faults.seed}:{name}:{self._sent[name]}").random
        faults, fate, loss = self._faults, draw(), None
        for kind in LOSSES:
            if 0 <= fate < getattr(faults, kind):
                loss = kind
            fate -= getattr(faults, kind)
        # always as many draws, so that one probability does not change what another does
        share, again, when, late, length, side, order = (draw() for _ in range(7))
        return _Plan(
            loss=loss,
            share=share,
            duplicate=_places_later(when) if again < faults.duplicate else None,
            delay=length * faults.delay_seconds if late < faults.delay else None,
            late_answer=side < 0.5,
            reorder=order < faults.reorder,
        )

    async def _carry(self, message: Message, timeout: float, plan: _Plan) -> Any:
        if plan.loss is None:
            return await self._inner.call(message, timeout)
        self.injected[plan.loss] += 1
        if plan.loss.startswith("cut_") and isinstance(self._inner, HttpTransport):
            cut = Cut("up" if plan.loss == "cut_request" else "down", plan.share)
            return await self._inner.call(message, timeout, cut)
        if plan.loss in ("lose_response", "cut_response"):
            try:
                await self._inner.call(message, timeout)
            except RemoteRLError:
                pass  # an answer like any other, and just as lost
        raise ConnectionLost(f"injected: {plan.loss}")

    async def _be_late(self, seconds: float) -> None:
        self.injected["delay"] += 1
        if seconds:
            await asyncio.sleep(seconds)

    def _duplicate(self, message: Message, timeout: float, place: int, later: int) -> None:
        self.injected["duplicate"] += 1
        task = asyncio.ensure_future(self._deliver_again(message, timeout, _Held(place, later)))
        self._duplicates.add(task)
        task.add_done_callback(self._duplicates.discard)

    async def _deliver_again(self, message: Message, timeout: float, held: _Held) -> None:
        await self._overtaken(held, None)
        try:
            await self._inner.call(message, min(timeout, _DUPLICATE_SECONDS))
        except ConnectionLost:
            pass  # over HTTP a wait may last longer; whether it was answered matters to nobody
        except RemoteRLError:
            self.injected["duplicate_refused"] += 1

    async def _overtaken(self, held: _Held, patience: float | None) -> None:
        if not held.left or self._closing:
            return
        self._held.append(held)
        try:
            await asyncio.wait_for(held.free.wait(), patience)
        except TimeoutError:
            pass  # nothing came that could have overtaken it
        finally:
            self._held.remove(held)

    def _answered(self, place: int) -> None:
        for held in self._held:
            if held.place < place:
                held.left -= 1
                if held.left <= 0:
                    held.free.set()


def _name(message: Message) -> str:
    """The same for every sending of the same message; messages without a number share one."""
    kind = type(message).__name__
    if isinstance(message, Submit):
        row = OPERATIONS.get(message.operation)
        stream = message.operation if row is None else row.stream.value
        return f"{kind}:{stream}:{message.number}"
    if isinstance(message, Cancel):
        return f"{kind}:{message.stream}:{message.number}"
    return kind


def _places_later(draw: float) -> int:
    """Half of the duplicates go at once."""
    return 0 if draw < 0.5 else 1 + int((2 * draw - 1) * _LATEST_DUPLICATE)
