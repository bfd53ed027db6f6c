"""Which half is awake, by what operations need. The halves stand for devices only: they count their
memory, and say when something runs on one that isn't there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.arctic.placing import SAMPLING, TRAINING, Level, Placing
from remote_rl.errors import BackendError

AWAKE, ASLEEP, WEIGHTS = Level.AWAKE, Level.ASLEEP, Level.WEIGHTS


class Device:
    """A half. moves: what was done to it, in order. fails: how many of the next moves raise."""

    def __init__(self) -> None:
        self.level: Level = AWAKE
        self.moves: list[Level] = []
        self.fails = 0

    async def sleep(self) -> None:
        await self._to(ASLEEP)

    async def wake(self, level: Level) -> None:
        assert level > self.level, "woken without need"
        await self._to(level)

    async def _to(self, level: Level) -> None:
        await asyncio.sleep(0)
        if self.fails:
            self.fails -= 1
            self.level = ASLEEP  # a broken half is ended, and holds nothing
            raise OSError("no memory left")
        self.level = level
        self.moves.append(level)


class Shared:
    """Two devices, and what runs on them."""

    def __init__(self, exclusive: bool = True) -> None:
        self.training, self.sampling = Device(), Device()
        self.exclusive = exclusive
        self.placing = Placing(self.training, self.sampling, exclusive=exclusive, linger=0)
        self.told: list[str] = []
        self.paused = False
        self.finished = 0

    def _check_training(self, highest: Level) -> None:
        assert self.training.level is AWAKE
        if self.exclusive:
            assert self.sampling.level <= highest

    async def train(self, steps: int = 2) -> None:
        async with self.placing.hold(TRAINING, told=self.told.append):
            for _ in range(steps):
                self._check_training(ASLEEP)
                await asyncio.sleep(0)

    async def sync(self, wait: bool = False) -> None:
        hold = self.placing.hold(TRAINING, SAMPLING, told=self.told.append, drained=wait)
        finished = self.finished
        async with hold:
            for _ in range(2):
                self._check_training(WEIGHTS)
                assert self.sampling.level >= WEIGHTS
                await asyncio.sleep(0)
            if wait and self.exclusive:
                assert self.finished >= finished

    async def push(self) -> None:
        async with self.placing.hold(SAMPLING, told=self.told.append):
            assert self.sampling.level is AWAKE
            if self.exclusive:
                assert self.training.level is ASLEEP

    async def draw(self, tokens: int = 3, aborted: asyncio.Event | None = None) -> int:
        aborted = aborted or asyncio.Event()

        async def work() -> int:
            drawn = 0
            while drawn < tokens and not aborted.is_set():
                await asyncio.sleep(0)
                # an engine that sleeps, or is paused, takes no step
                if self.sampling.level is AWAKE and not self.paused:
                    drawn += 1
            self.finished += 1
            return drawn

        return await self.placing.draw(work, self.told.append, aborted)

    def pause(self, paused: bool) -> None:
        self.paused = paused
        self.placing.pause(paused)

    async def settled(self, turns: int = 50) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)


def runs(script: Callable[[Shared], Awaitable[Any]], exclusive: bool = True) -> Shared:
    """Runs a script to its end; what waits for ever fails."""

    async def whole() -> Shared:
        shared = Shared(exclusive)
        async with asyncio.timeout(20):
            await script(shared)
        return shared

    return asyncio.run(whole())


# -- an operation wakes what it needs -------------------------------------------------------------


def test_a_step_of_a_loop_moves_each_half_once() -> None:
    async def script(shared: Shared) -> None:
        await shared.draw()
        assert (shared.training.level, shared.sampling.level) == (ASLEEP, AWAKE)
        for _ in range(3):
            shared.training.moves.clear()
            shared.sampling.moves.clear()
            await shared.train()
            await shared.train()
            await shared.sync()
            await shared.draw()
            assert shared.training.moves == [AWAKE, ASLEEP]
            assert shared.sampling.moves == [ASLEEP, WEIGHTS, AWAKE]

    runs(script)


def test_halves_with_memory_of_their_own_stay_awake() -> None:
    async def script(shared: Shared) -> None:
        for _ in range(2):
            await shared.draw()
            await shared.train()
            await shared.sync(wait=True)
            await shared.push()

    shared = runs(script, exclusive=False)
    assert shared.training.moves == shared.sampling.moves == []


@pytest.mark.parametrize("exclusive", [True, False])
@pytest.mark.parametrize("need", ["train", "sync"])
def test_a_trainer_that_was_put_to_sleep_is_woken_by_the_next_that_needs_it(
    exclusive: bool, need: str
) -> None:
    async def script(shared: Shared) -> None:
        await shared.placing.sleep(TRAINING)
        assert shared.training.level is ASLEEP
        await shared.draw()
        assert shared.training.level is ASLEEP, "a generate needs no trainer"
        await getattr(shared, need)()

    runs(script, exclusive)


@pytest.mark.parametrize("exclusive", [True, False])
@pytest.mark.parametrize("need", ["draw", "sync", "push"])
def test_a_sampler_that_was_put_to_sleep_is_woken_by_the_next_that_needs_it(
    exclusive: bool, need: str
) -> None:
    async def script(shared: Shared) -> None:
        await shared.placing.sleep(SAMPLING)
        await shared.placing.sleep(SAMPLING)
        assert shared.sampling.moves == [ASLEEP]
        await shared.train()
        assert shared.sampling.level is ASLEEP, "training needs no sampler"
        await getattr(shared, need)()
        assert shared.sampling.level >= WEIGHTS

    runs(script, exclusive)


def test_wake_is_what_an_operation_would_do() -> None:
    async def script(shared: Shared) -> None:
        await shared.placing.wake(TRAINING, shared.told.append)
        assert (shared.training.level, shared.sampling.level) == (AWAKE, ASLEEP)
        await shared.placing.wake(SAMPLING, shared.told.append)
        assert (shared.training.level, shared.sampling.level) == (ASLEEP, AWAKE)

    runs(script)


# -- generates never block ------------------------------------------------------------------------


def test_a_generate_makes_way_for_training_and_goes_on() -> None:
    async def script(shared: Shared) -> None:
        generate = asyncio.create_task(shared.draw(200))
        await shared.settled(20)
        for _ in range(3):
            await shared.train(100)
            assert not generate.done()
        assert await generate == 200

    runs(script)


def test_a_generate_that_is_paused_lets_the_trainer_keep_its_memory() -> None:
    async def script(shared: Shared) -> None:
        generate = asyncio.create_task(shared.draw(50))
        await shared.settled(20)
        shared.pause(True)
        await shared.train()
        shared.training.moves.clear()
        await shared.settled()
        await shared.train()
        await shared.sync()
        assert shared.training.moves == []
        shared.pause(False)
        assert await generate == 50

    runs(script)


@pytest.mark.parametrize("need", ["draw", "sync", "push"])
def test_a_sleep_by_hand_holds_generates_until_another_operation_needs_the_sampler(
    need: str,
) -> None:
    async def script(shared: Shared) -> None:
        generate = asyncio.create_task(shared.draw(50))
        await shared.settled(20)
        await shared.placing.sleep(SAMPLING)
        await shared.train()
        await shared.settled()
        assert shared.sampling.level is ASLEEP
        assert not generate.done()
        await getattr(shared, need)()
        assert await generate == 50

    runs(script)


def test_a_sleep_by_hand_waits_for_what_runs() -> None:
    async def script(shared: Shared) -> None:
        train = asyncio.create_task(shared.train(30))
        await shared.settled(3)
        await shared.placing.sleep(TRAINING)
        assert train.done()
        await train

    runs(script, exclusive=False)


def test_a_sync_that_waits_lets_generates_end_first_and_later_ones_wait_for_it() -> None:
    async def script(shared: Shared) -> None:
        order: list[str] = []

        async def noted(name: str, work: Awaitable[Any]) -> None:
            await work
            order.append(name)

        first = asyncio.create_task(noted("first", shared.draw(80)))
        await shared.settled(20)
        await shared.train()
        sync = asyncio.create_task(noted("sync", shared.sync(wait=True)))
        await shared.settled(5)
        late = asyncio.create_task(noted("late", shared.draw(1)))
        await asyncio.gather(first, sync, late)
        assert order == ["first", "sync", "late"]

    runs(script)


def test_a_generate_that_is_cancelled_is_forgotten() -> None:
    async def script(shared: Shared) -> None:
        await shared.train()
        generate = asyncio.create_task(shared.draw(10**9))
        await shared.settled()
        generate.cancel()
        with pytest.raises(asyncio.CancelledError):
            await generate
        await shared.train()
        shared.sampling.moves.clear()
        await shared.settled()
        assert shared.sampling.moves == []

    runs(script)


def test_a_generate_that_waits_for_a_sync_ends_where_it_is_aborted() -> None:
    async def script(shared: Shared) -> None:
        running = asyncio.create_task(shared.draw(10**9))
        await shared.settled(20)
        sync = asyncio.create_task(shared.sync(wait=True))
        await shared.settled(5)
        aborted = asyncio.Event()
        late = asyncio.create_task(shared.draw(10**9, aborted))
        await shared.settled(5)
        aborted.set()
        assert await late == 0
        assert not sync.done()
        running.cancel()
        await sync

    runs(script)


def lingering(shared: Shared, seconds: float) -> None:
    shared.placing = Placing(shared.training, shared.sampling, exclusive=True, linger=seconds)


def test_the_sampler_waits_a_moment_for_more_training_and_not_after_a_delivery() -> None:
    async def script(shared: Shared) -> None:
        lingering(shared, 1000)
        await shared.train()
        generate = asyncio.create_task(shared.draw(30))
        for _ in range(5):
            await shared.train()
            await shared.settled()
        assert shared.training.moves == []
        generate.cancel()
        lingering(shared, 1000)
        await shared.sync()
        assert await shared.draw() == 3

    runs(script)


def test_training_that_follows_at_once_finds_the_trainer_awake() -> None:
    async def script(shared: Shared) -> None:
        await shared.train()
        generate = asyncio.create_task(shared.draw(30))
        shared.placing.pause(True)
        await shared.settled()
        shared.training.moves.clear()
        first = asyncio.create_task(shared.train(20))
        await shared.settled(5)
        shared.placing.pause(False)
        await shared.settled(5)
        await asyncio.gather(first, shared.train(50))
        assert shared.training.moves in ([], [AWAKE])
        assert await generate == 30

    runs(script)


def test_a_sampler_s_turn_is_given_up_half_way_where_training_comes() -> None:
    async def script(shared: Shared) -> None:
        await shared.train()
        generate = asyncio.create_task(shared.draw(30))
        while shared.placing.level(TRAINING) is not None:  # on its way to sleep
            await asyncio.sleep(0)
        await shared.train()
        assert shared.training.moves == [ASLEEP, AWAKE]
        assert shared.sampling.moves == [ASLEEP]
        assert await generate == 30

    runs(script)


# -- failures -------------------------------------------------------------------------------------


@contextmanager
def named(half: str, what: str) -> Iterator[None]:
    with pytest.raises(BackendError, match=f"the {half} half could not be {what} .*no memory") as e:
        yield
    assert e.value.details["worker"] == half
    assert "OSError" in e.value.details["traceback"]


def test_a_move_that_fails_is_told_to_who_needed_it_and_tried_again_by_the_next() -> None:
    async def script(shared: Shared) -> None:
        shared.sampling.fails = 1
        with named("sampling", "put to sleep"):
            await shared.train()
        assert shared.placing.level(SAMPLING) is None
        await shared.train()
        shared.sampling.fails = 1
        with named("sampling", "woken"):
            await shared.sync()
        await shared.sync()
        shared.training.fails = 1
        with named("training", "put to sleep"):
            await shared.draw()
        await shared.draw()
        shared.training.fails = 1
        with named("training", "woken"):
            await shared.train()
        await shared.train()

    runs(script)


def test_generates_that_wait_for_a_sampler_that_cannot_be_woken_hear_of_it_and_spare_the_next() -> (
    None
):
    async def script(shared: Shared) -> None:
        generates = [asyncio.create_task(shared.draw(500)) for _ in range(3)]
        await shared.settled(20)
        await shared.train()
        shared.sampling.fails = 2
        for generate in generates:
            with named("sampling", "woken"):
                await generate
        await shared.settled()
        assert shared.sampling.fails == 1, "nobody draws, and it was woken again"
        with named("sampling", "woken"):
            await shared.draw()
        assert await shared.draw() == 3

    runs(script)


def test_a_sampler_that_cannot_be_woken_is_not_tried_again_for_generates_that_leave() -> None:
    async def script(shared: Shared) -> None:
        left = asyncio.Event()

        async def forgotten_slowly() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await left.wait()

        await shared.train()
        shared.sampling.fails = 2
        work = shared.placing.draw(forgotten_slowly, shared.told.append, asyncio.Event())
        generate = asyncio.create_task(work)
        await shared.settled()
        shared.placing.pause(False)  # something changes
        await shared.settled()
        assert shared.sampling.fails == 1
        left.set()
        with named("sampling", "woken"):
            await generate

    runs(script)


def test_what_work_raises_is_raised() -> None:
    async def script(shared: Shared) -> None:
        async def broken() -> None:
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            await shared.placing.draw(broken, shared.told.append, asyncio.Event())
        await shared.train()

    runs(script)


def test_a_half_that_was_started_again_is_awake() -> None:
    async def script(shared: Shared) -> None:
        await shared.train()
        shared.training.fails = 1
        with named("training", "put to sleep"):
            await shared.draw()
        shared.training.level = AWAKE
        shared.placing.renewed(TRAINING)
        await shared.train()

    runs(script)


def test_who_waits_long_gives_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.arctic.placing._BEAT_SECONDS", 0.001)

    async def script(shared: Shared) -> None:
        generate = asyncio.create_task(shared.draw(1))
        async with shared.placing.hold(TRAINING, told=shared.told.append):
            while not shared.told:
                await asyncio.sleep(0.001)
        await generate
        assert set(shared.told) == {"waiting for the sampling half to wake"}

    runs(script)


# -- any order of operations ----------------------------------------------------------------------

ACTIONS = (
    "train",
    "sync",
    "sync wait",
    "push",
    "generate",
    "sleep training",
    "sleep sampling",
    "wake training",
    "wake sampling",
    "pause",
    "resume",
    "fail training",
    "fail sampling",
    "let it run",
)


class Reference:
    """What is sure without knowing how: who is needed is awake at the end of the operation, and a
    failure comes from a move that was made to fail."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.generates: list[tuple[int, asyncio.Task[int]]] = []
        self.broken = 0

    async def act(self, action: str, number: int) -> None:
        shared, what, half = self.shared, *(*action.split(), "")[:2]
        if what == "generate":
            tokens = 1 + number % 7
            self.generates.append((tokens, asyncio.create_task(shared.draw(tokens))))
        elif what in ("pause", "resume"):
            shared.pause(what == "pause")
        elif what == "fail":
            self.broken += 1
            getattr(shared, half).fails += 1
        elif what == "let":
            await shared.settled(number % 9)
        elif action == "sync wait":
            shared.pause(False)  # the dispatcher refuses it while generation is paused
            await self.may_fail(shared.sync(wait=True))
        elif what in ("sleep", "wake"):
            told = () if what == "sleep" else (shared.told.append,)
            await self.may_fail(getattr(shared.placing, what)(half, *told))
        else:
            await self.may_fail(getattr(shared, what)())

    async def may_fail(self, work: Awaitable[Any]) -> Any:
        try:
            return await work
        except BackendError:
            if not self.broken:  # nothing was made to fail
                raise
            return None

    async def end(self) -> None:
        """All generates end, with every token, once nothing stands in their way."""
        self.shared.pause(False)
        self.shared.training.fails = self.shared.sampling.fails = 0
        assert await self.may_fail(self.shared.draw(2)) in ((2, None) if self.broken else (2,))
        for tokens, generate in self.generates:
            assert await self.may_fail(generate) in ((tokens, None) if self.broken else (tokens,))
        await self.shared.sync(wait=True)
        assert await self.shared.draw(1) == 1


@given(
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 50)), max_size=14),
    exclusive=st.booleans(),
)
def test_in_any_order_nothing_runs_without_its_memory_and_everything_ends(
    actions: list[tuple[str, int]], exclusive: bool
) -> None:
    async def script(shared: Shared) -> None:
        reference = Reference(shared)
        for action, number in actions:
            await reference.act(action, number)
        await reference.end()

    runs(script, exclusive)
