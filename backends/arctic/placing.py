"""Arctic backend: which half of the engine has its memory, by what operations need (imports the
contract's errors and requests; it knows of no device)."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from remote_rl.errors import BackendError
from remote_rl.requests import Half

T = TypeVar("T")

log = logging.getLogger("remote_rl.arctic")

#: hears what an operation waits for: a sign of life
Told = Callable[[str], None]

TRAINING: Half = "training"
SAMPLING: Half = "sampling"
_BEAT_SECONDS = 1.0
#: a pipeline's next training operation comes within it, and the sampler is not woken for less
_LINGER_SECONDS = 0.2


class Level(enum.IntEnum):
    """How much of its memory a half has."""

    ASLEEP = 0
    WEIGHTS = 1  # a sampler's weights without its cache: what a delivery needs
    AWAKE = 2


class Sleeper(Protocol):
    """A half that can give its memory back."""

    async def sleep(self) -> None:
        """From any level to ASLEEP."""

    async def wake(self, level: Level) -> None:
        """From a lower level to this one; only a sampler is woken to WEIGHTS."""


class Placing:
    """Wakes the halves that operations need and, where they share GPUs, puts the other one to sleep
    first. A move that fails fails whoever needed it, and is made again for the next one.

    Operations `hold` what they need; nobody puts that to sleep until they end. Generates `draw`:
    they are outside the order and never keep it waiting, so for whoever holds the trainer the
    sampler falls asleep between two of their tokens, and it goes on when nobody does any more.

    exclusive: at most one half is awake, except that a delivery has the trainer and the sampler's
    weights. linger: seconds that the sampler waits for another operation of the trainer, unless the
    last one was a delivery.
    """

    def __init__(
        self,
        training: Sleeper,
        sampling: Sleeper,
        *,
        exclusive: bool,
        linger: float = _LINGER_SECONDS,
    ) -> None:
        self._halves: dict[Half, Sleeper] = {TRAINING: training, SAMPLING: sampling}
        self.exclusive = exclusive
        self._linger = linger
        #: None: a move failed, and nobody knows
        self._levels: dict[Half, Level | None] = dict.fromkeys(self._halves, Level.AWAKE)
        self._moving = asyncio.Lock()
        self._asking = 0  # holds that wait for their turn to move
        self._using: Counter[Half] = Counter()  # by holds
        self._drawing = self._leaving = 0
        self._delivered = False  # by the last hold
        self._paused = self._put_to_sleep = self._draining = False
        self._failing: asyncio.Future[BackendError] | None = None
        self._serving: asyncio.Task[None] | None = None
        self._change = asyncio.Event()

    def level(self, half: Half) -> Level | None:
        """Where a half is; None while it is moved, or where that failed."""
        return self._levels[half]

    # -- operations ---------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def hold(self, *needed: Half, told: Told, drained: bool = False) -> AsyncIterator[None]:
        """Within, these halves are awake, of an exclusive sampler beside the trainer its weights.
        drained: no generate runs, and those that come wait; where halves are not exclusive, the
        sampler sees to that. Raises `BackendError` where a half can't be moved."""
        drained = drained and self.exclusive
        try:
            what = f"waiting for the {' and '.join(needed)} half to wake"
            async with _beating(told, lambda: what):
                await self._enter(needed, drained)
            try:
                yield
            finally:
                self._using.subtract(needed)
                self._delivered = len(needed) == len(self._halves)
        finally:
            self._draining = self._draining and not drained
            self._changed()

    async def _enter(self, needed: tuple[Half, ...], drained: bool) -> None:
        self._asking += 1
        try:
            await self._moving.acquire()
        finally:
            self._asking -= 1
        try:
            if SAMPLING in needed:
                self._put_to_sleep = False
            if drained:
                self._draining = True
                if self._drawing:
                    await self._arrange(SAMPLING)
                await self._until(lambda: not self._drawing)
            await self._arrange(*needed)
            self._using.update(needed)
        finally:
            self._moving.release()

    async def draw(
        self, work: Callable[[], Coroutine[Any, Any, T]], told: Told, aborted: asyncio.Event
    ) -> T:
        """The result of `work`, which draws while the sampler is awake. Raises what it raises, and
        `BackendError` where the sampler can't be woken for it. aborted: `work` ends soon once this
        is set, and waits for nobody then."""
        async with _beating(told, self._why_nothing_is_drawn):
            hearing = asyncio.ensure_future(self._hear(aborted))
            try:
                await self._until(lambda: not self._draining or aborted.is_set())
            finally:
                hearing.cancel()
            if aborted.is_set():
                return await work()
            self._put_to_sleep = False
            self._drawing += 1
            failing = self._failing = self._failing or asyncio.get_running_loop().create_future()
            task = asyncio.ensure_future(work())
            try:
                self._changed()
                await asyncio.wait({task, failing}, return_when=asyncio.FIRST_COMPLETED)
                if task.done():
                    return task.result()
                raise failing.result().copy()
            finally:
                task.cancel()
                self._leaving += 1  # engines still have to forget it, and are not woken for it
                await asyncio.wait({task})
                _ = task.cancelled() or task.exception()  # looked at, so asyncio doesn't complain
                self._leaving -= 1
                self._drawing -= 1
                self._changed()

    async def _hear(self, aborted: asyncio.Event) -> None:
        await aborted.wait()
        self._changed()

    def _why_nothing_is_drawn(self) -> str:
        if self._levels[SAMPLING] is Level.AWAKE and not self._draining:
            return ""
        return "waiting for the sampling half to wake"

    def pause(self, paused: bool) -> None:
        """While generates are held, the sampler is not woken for them."""
        self._paused = paused
        self._changed()

    def renewed(self, half: Half) -> None:
        """A half was started again, and is awake."""
        self._levels[half] = Level.AWAKE

    # -- by hand ------------------------------------------------------------------------------

    async def sleep(self, half: Half) -> None:
        """Until an operation comes that needs it. Generates that run are held until then."""
        async with self._moving:
            self._put_to_sleep = self._put_to_sleep or half == SAMPLING
            if self._levels[half] is not Level.ASLEEP:
                await self._move(half, Level.ASLEEP)

    async def wake(self, half: Half, told: Told) -> None:
        """Before an operation needs it."""
        async with self.hold(half, told=told):
            pass

    # -- moves --------------------------------------------------------------------------------

    async def _arrange(self, *needed: Half, gives_way: bool = False) -> None:
        """Moves whatever is not where it should be: first what gives memory back. gives_way: to
        whoever asks meanwhile."""
        for half, wanted in self._wanted(needed).items():
            now = self._levels[half]
            if (now is None and wanted is Level.ASLEEP) or (now is not None and now > wanted):
                await self._move(half, Level.ASLEEP)
        for half, wanted in self._wanted(needed).items():
            now = self._levels[half]
            if (now is None or now < wanted) and not (gives_way and self._asking):
                await self._move(half, wanted)

    def _wanted(self, needed: tuple[Half, ...]) -> dict[Half, Level]:
        if not self.exclusive:
            return dict.fromkeys(needed, Level.AWAKE)
        wanted = {half: Level.AWAKE if half in needed else Level.ASLEEP for half in self._halves}
        if len(needed) == len(self._halves):
            wanted[SAMPLING] = Level.WEIGHTS
        return wanted

    async def _move(self, half: Half, level: Level) -> None:
        if level is Level.ASLEEP:
            await self._until(lambda: not self._using[half])
        self._levels[half] = None
        try:
            if level is Level.ASLEEP:
                await self._halves[half].sleep()
            else:
                await self._halves[half].wake(level)
        except Exception as error:
            what = "put to sleep" if level is Level.ASLEEP else "woken"
            told = getattr(error, "details", {})
            raise BackendError(
                f"the {half} half could not be {what} ({error}); the next operation tries it again",
                worker=told.get("worker", half),
                traceback=told.get("traceback") or traceback.format_exc(),
            ) from error
        self._levels[half] = level
        log.info("the %s half has moved: %s", half, level.name)

    # -- the sampler's turn -------------------------------------------------------------------

    def _changed(self) -> None:
        change, self._change = self._change, asyncio.Event()
        change.set()
        if self._is_wanted() and self._serving is None:
            self._serving = asyncio.create_task(self._serve_draws(), name="the sampler's turn")

    async def _until(self, true: Callable[[], bool]) -> None:
        while not true():
            await self._change.wait()

    def _is_wanted(self) -> bool:
        """Whether generates wait for a sampler that may be woken now."""
        if self._drawing == self._leaving or self._paused or self._put_to_sleep:
            return False
        if not self.exclusive:
            return self._levels[SAMPLING] is not Level.AWAKE
        placed = (self._levels[TRAINING], self._levels[SAMPLING]) == (Level.ASLEEP, Level.AWAKE)
        return not placed and not self._using[TRAINING]

    async def _serve_draws(self) -> None:
        try:
            if self.exclusive and not self._delivered:
                await asyncio.sleep(self._linger)
            async with self._moving:
                if self._is_wanted():
                    await self._arrange(SAMPLING, gives_way=True)
        except BackendError as error:
            if self._failing is not None:
                self._failing.set_result(error)
                self._failing = None
        finally:
            self._serving = None


@contextlib.asynccontextmanager
async def _beating(told: Told, what: Callable[[], str]) -> AsyncIterator[None]:
    """Tells every second what is waited for; nothing where that is empty."""

    async def beat() -> None:
        while True:
            await asyncio.sleep(_BEAT_SECONDS)
            if what():
                told(what())

    beating = asyncio.ensure_future(beat())
    try:
        yield
    finally:
        beating.cancel()
