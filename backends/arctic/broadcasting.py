"""Arctic backend: deliveries in which the trainer's rank 0 broadcasts to all engines at once
(imports asking, weights and the contract).

Two sides that wait for each other must not wait for ever. So the engines are ready before a rank
begins; where one side fails, the other is told to leave; and what hangs is ended, an engine that
does not answer, or ranks that do nothing, by the same patience. The ranks outlive a delivery that
fails, since each of them goes to the end of its gathers; the next delivery makes a new group.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from remote_rl.errors import BackendError, RemoteRLError
from remote_rl.protocol import OperationContext
from remote_rl.requests import InFlight

from .asking import answered, asked, is_death, is_of_the_group, most_telling
from .weights.manifest import Form, Manifest, lay_out
from .weights.sources import Broadcast, Kind, Meeting, Source

if TYPE_CHECKING:
    from .sampler_worker import SamplerWorker
    from .samplers import SamplerPool
    from .trainers import TrainerGroup

log = logging.getLogger("remote_rl.arctic")

LOOK_SECONDS = 1.0
#: for engines to say that they have failed, once the ranks have; NCCL would let them wait for ever
GRACE_SECONDS = 10.0


@attrs.frozen(eq=False)
class Sent:
    """What the engines are told of a delivery. in_flight: what they are still to do themselves.
    among: processes of the engines that take part, None is all. failed: told as soon as one of them
    fails."""

    manifest: Manifest
    source: Source
    in_flight: InFlight
    among: tuple[Any, ...] | None = None
    failed: Callable[[], None] = lambda: None


@attrs.frozen(eq=False)
class _Group:
    """meeting: where it met. ranks, engines: the processes that did."""

    meeting: Meeting
    ranks: tuple[Any, ...]
    engines: tuple[Any, ...]


class _Heard:
    """An operation's context that knows when it last heard of progress."""

    def __init__(self, context: OperationContext) -> None:
        self._context = context
        self._last = time.monotonic()

    @property
    def silence(self) -> float:
        """Seconds."""
        return time.monotonic() - self._last

    def progress(self, done: float, total: float | None = None, what: str = "") -> None:
        """Of the ranks; told only where they have done something."""
        self._last = time.monotonic()
        self._context.progress(done, total, what)


class Broadcasts:
    """All deliveries of a run by broadcast. workers_each: of an engine. patience: seconds after
    which what does nothing is given up."""

    def __init__(
        self,
        trainers: TrainerGroup,
        pool: SamplerPool,
        kind: Kind,
        workers_each: int,
        patience: float,
    ) -> None:
        self._trainers = trainers
        self._pool = pool
        self._kind = kind
        self._workers_each = workers_each
        self._patience = patience
        self._group: _Group | None = None

    @contextlib.asynccontextmanager
    async def sent(
        self, expected: Mapping[str, Form], in_flight: InFlight, context: OperationContext
    ) -> AsyncIterator[Sent]:
        """Within, the ranks broadcast all weights in the forms that the engines expect. Raises what
        the ranks refuse, and `BackendError`. Until it is entered, the engines serve what they
        did."""
        await self._ranks("check_weights", expected, context=context)
        manifest = lay_out({name: expected[name] for name in self._trainers.forms})
        async with self._watching_engines(context):
            await self._met(context)  # before anything in flight is ended for nothing
            async with self._prepared(manifest, in_flight):
                group = await self._met(context)  # without engines that have died meanwhile
                async with self._sending(group, manifest, expected, context) as sent:
                    yield sent

    # -- the group ----------------------------------------------------------------------------

    async def _met(self, context: OperationContext) -> _Group:
        """The group of all that live: the last one, or one that meets now."""
        living = self._pool.living
        if not living:
            raise BackendError("every sampling engine has died; sync again, which waits for one")
        ranks, engines = self._trainers.processes, tuple(each.process for each in living)
        group = self._group
        if group is not None and (group.ranks, group.engines) == (ranks, engines):
            return group
        self._group = None
        (port, *_) = await self._ranks("open_store", self._patience, context=context)
        if isinstance(port, RemoteRLError):
            raise port
        meeting = Meeting(
            kind=self._kind,
            name=secrets.token_hex(8),
            address=self._trainers.host,
            port=port,
            size=1 + len(living) * self._workers_each,
            patience=self._patience,
        )
        await self._meet(meeting, living, context)
        self._group = _Group(meeting, ranks, engines)
        log.info("%s: a group of %d for broadcasts", context.request_id, meeting.size)
        return self._group

    async def _meet(
        self, meeting: Meeting, living: Sequence[SamplerWorker], context: OperationContext
    ) -> None:
        joining = asyncio.ensure_future(
            self._ranks("join_group", meeting, context=context, group=meeting.name)
        )
        connecting = [
            asyncio.ensure_future(self._connect(each, meeting, number))
            for number, each in enumerate(living)
        ]
        try:
            answers = await asyncio.gather(*connecting, return_exceptions=True)
            (failure, *_) = await joining
        finally:
            if not joining.done():
                self._trainers.call_off(meeting.name)
                joining.cancel()
        failures = [each for each in (*answers, failure) if isinstance(each, BaseException)]
        if failures:
            raise most_telling(failures)

    async def _connect(self, worker: SamplerWorker, meeting: Meeting, number: int) -> None:
        try:
            # more than it takes by itself
            await answered(worker, 3 * self._patience, "connect", meeting, number)
        except RemoteRLError:
            self._trainers.call_off(meeting.name)  # nobody waits for this one
            raise

    # -- both sides ---------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _prepared(self, manifest: Manifest, in_flight: InFlight) -> AsyncIterator[None]:
        """Within, the engines can take weights between any two of their steps."""
        try:
            for answer in await asked(self._pool.living, "prepare", manifest, in_flight):
                if isinstance(answer, BaseException) and not is_death(answer):
                    raise answer
            yield
        finally:
            if in_flight != "keep":
                await asked(self._pool.living, "go_on")

    @contextlib.asynccontextmanager
    async def _sending(
        self,
        group: _Group,
        manifest: Manifest,
        expected: Mapping[str, Form],
        context: OperationContext,
    ) -> AsyncIterator[Sent]:
        name = group.meeting.name
        ranks = asyncio.ensure_future(
            self._ranks("broadcast", name, expected, context=context, group=name)
        )
        ending = asyncio.ensure_future(self._end_waiting(ranks))
        try:
            yield Sent(
                manifest=manifest,
                source=Broadcast(name),
                in_flight="keep",
                among=group.engines,
                failed=lambda: self._call_off(name),
            )
            await asyncio.wait({ranks})
            if _failed(ranks):  # the engines have it all; who needs the ranks next hears of it
                log.warning("the ranks did not end their broadcast well: %s", _failure(ranks))
        except Exception as error:
            self._call_off(name)
            await asyncio.wait({ranks})
            cause = _cause(error, ranks)
            if cause is error:
                raise
            raise cause from error
        finally:
            ending.cancel()
            if _failed(ranks):
                self._call_off(name)
                ranks.cancel()

    def _call_off(self, name: str) -> None:
        """Rank 0 leaves the group, now or when it hears of it: nobody meets in that one again."""
        self._group = None
        self._trainers.call_off(name)

    # -- what hangs ---------------------------------------------------------------------------

    async def _ranks(
        self, method: str, *arguments: Any, context: OperationContext, group: str = ""
    ) -> list[Any]:
        """As `TrainerGroup.everywhere`. Where nothing moves for too long, first what they wait for
        in this group is called off, then they are ended."""
        heard: Any = _Heard(context)
        work = asyncio.ensure_future(self._trainers.everywhere(method, *arguments, context=heard))
        patience = self._patience
        try:
            while not (await asyncio.wait({work}, timeout=LOOK_SECONDS))[0]:
                if heard.silence > 2 * patience:
                    self._trainers.give_up(f"the ranks did nothing for {2 * patience:g} s")
                elif heard.silence > patience and group:
                    self._call_off(group)
            return work.result()
        finally:
            work.cancel()

    async def _end_waiting(self, ranks: asyncio.Future[list[Any]]) -> None:
        """Ends engines that wait on when the ranks are through."""
        await asyncio.wait({ranks})
        patience = min(GRACE_SECONDS, self._patience) if _failed(ranks) else self._patience
        await asyncio.sleep(patience)
        for each in self._pool.living:
            if each.updating:
                each.give_up(f"did not end its update within {patience:g} s after the ranks")

    @contextlib.asynccontextmanager
    async def _watching_engines(self, context: OperationContext) -> AsyncIterator[None]:
        """Tells of what they draw, since those that let samples end may take long, and ends those
        that do not answer."""

        async def watch() -> None:
            before: list[Any] = []
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                now = await asyncio.gather(*(self._pulse(each) for each in self._pool.living))
                if now != before:
                    context.progress(0.0, None, "delivering weights")
                before = now

        watching = asyncio.ensure_future(watch())
        try:
            yield
        finally:
            watching.cancel()

    async def _pulse(self, worker: SamplerWorker) -> Any:
        with contextlib.suppress(RemoteRLError):  # the delivery itself tells
            return await answered(worker, self._patience, "pulse")
        return None


def _failed(ranks: asyncio.Future[list[Any]]) -> bool:
    """Whether they have not sent all, or not yet."""
    return not ranks.done() or ranks.cancelled() or _failure(ranks) is not None


def _failure(ranks: asyncio.Future[list[Any]]) -> BaseException | None:
    """Of ranks that are through: why they are gone, or what ended rank 0's broadcast."""
    lost = ranks.exception()
    if lost is not None:
        return lost
    (failure, *_) = ranks.result()
    return failure  # type: ignore[no-any-return]


def _cause(error: Exception, ranks: asyncio.Future[list[Any]]) -> BaseException:
    """Of what both sides tell: ranks that are gone, an engine that has died, what rank 0 found by
    itself, else what an engine did."""
    failure = _failure(ranks)
    if ranks.exception() is None and (is_of_the_group(failure) or is_death(error)):
        return error
    return failure or error
