"""Several sampling engines as one sampler: what of their lives and deaths it remembers. The engines
are stood for by what answers as they do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

import numpy as np
import pytest

from backends.arctic import samplers
from backends.arctic.config import ArcticConfig
from backends.arctic.placing import Level
from backends.arctic.samplers import SamplerPool
from remote_rl import SamplingParams
from remote_rl.errors import BackendError
from remote_rl.requests import Generate
from remote_rl.types import Ragged, Sample

SOON = 10.0


class Worker:
    """A `SamplerWorker` whose engine is a test's. hold: what an update waits for. long: samples
    that it draws do not end. asked: what it was asked but how far it is, in order."""

    def __init__(self, number: int, *given: Any) -> None:
        self.name, self._died = f"engine {number}", given[-1]
        self.ready = self.synced = False
        self.flying = self.lives = 0
        self.process: int | None = None
        self.failure: BackendError | None = None
        self.drawn = 0
        self.hold: asyncio.Event | None = None
        self.drew: list[int] = []
        self.long = False
        self.asked: list[tuple[Any, ...]] = []

    async def start(self, version: int | None, heard: Callable[[], None]) -> Mapping[str, Any]:
        self.lives += 1
        self.process = self.lives
        self.ready, self.synced = True, version is not None
        return {}

    def die(self) -> None:
        self.give_up("died")

    def give_up(self, why: str) -> None:
        self.end()
        self.failure = BackendError(f"it {why}", worker=self.name, died=True)
        self._died()

    def end(self) -> None:
        self.ready = self.synced = False
        self.process = None

    async def ask(self, method: str, *given: Any) -> Any:
        if method == "pulse":
            return self.drawn
        self.asked.append((method, *given))
        if method == "update" and self.hold is not None:
            life = self.process
            while not self.hold.is_set() and self.process == life:
                await asyncio.sleep(0)
            if self.process != life:
                assert self.failure is not None
                raise self.failure.copy()
        return "fingerprint"

    async def draw(self, requests: Any) -> AsyncIterator[Sample]:
        for request in requests:
            self.drew.append(request.prompt_index)
            while self.long:
                await asyncio.sleep(0)
                if not self.ready:
                    assert self.failure is not None
                    raise self.failure.copy()
            yield Sample(
                tokens=np.zeros(1, np.int32),
                logprobs=None,
                finish_reason="length",
                first_version=1,
                last_version=1,
                prompt_index=request.prompt_index,
                index=request.index,
            )


class Context:
    """Of one operation."""

    request_id, seed = "c:1", 0

    def __init__(self) -> None:
        self.told: list[str] = []
        self.abort_signal = asyncio.Event()

    @property
    def cancelled(self) -> bool:
        return self.abort_signal.is_set()

    def progress(self, done: float, total: float | None = None, what: str = "") -> None:
        self.told.append(what)

    def emit(self, sample: Sample) -> None: ...


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON):
        while not true():
            await asyncio.sleep(0)


def run(script: Callable[[SamplerPool, list[Any]], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        pool = SamplerPool(
            ArcticConfig(model="any", sampling={"engines": 2}),
            None,
            lambda: None,  # type: ignore[arg-type]
        )
        await pool.start(0)
        await script(pool, pool._workers)
        await pool.close()

    asyncio.run(whole())


@pytest.fixture(autouse=True)
def workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers, "SamplerWorker", Worker)
    monkeypatch.setattr(samplers, "HEARTBEAT_SECONDS", 0.01)


def deliver(pool: SamplerPool, context: Any) -> asyncio.Future[list[str]]:
    return asyncio.ensure_future(pool.update(None, "segment", "wait", 1, None, context))  # type: ignore[arg-type]


def generate(pool: SamplerPool, context: Any, prompts: int = 4) -> asyncio.Future[Any]:
    rows = Ragged.from_rows([np.zeros(1, np.int32)] * prompts, np.int32)
    request = Generate(prompts=rows, params=SamplingParams(max_tokens=1))
    return asyncio.ensure_future(pool.generate(request, context))


def test_an_engine_that_came_back_in_a_delivery_does_not_serve_without_it() -> None:
    """The others let long generates end first; it is there again before they do."""

    async def script(pool: SamplerPool, workers: list[Any]) -> None:
        first, second = workers
        first.hold, second.hold = asyncio.Event(), asyncio.Event()
        delivery = deliver(pool, Context())
        await until(lambda: first.process == 1)
        await asyncio.sleep(0)
        second.die()
        await until(lambda: second.ready and second.process == 2)
        first.hold.set()
        assert await delivery == ["fingerprint"]
        assert (first.synced, second.synced) == (True, False)
        await generate(pool, Context())
        assert sorted(first.drew) == [0, 1, 2, 3]
        assert second.drew == []

    run(script)


def test_a_delivery_that_waits_for_generates_shows_that_they_go_on() -> None:
    """A silent operation ends the run after some minutes, and samples may take longer."""

    async def script(pool: SamplerPool, workers: list[Any]) -> None:
        workers[0].hold = asyncio.Event()
        context = Context()
        delivery = deliver(pool, context)
        for count in range(1, 4):
            workers[0].drawn = count
            before = len(context.told)
            await until(lambda before=before: len(context.told) > before)  # type: ignore[misc]
        workers[0].hold.set()
        await delivery
        assert set(context.told) == {"delivering weights"}

    run(script)


def test_a_delivery_to_an_engine_that_hangs_is_silent() -> None:
    """So that whoever watches can end it."""

    async def script(pool: SamplerPool, workers: list[Any]) -> None:
        asked = 0

        async def ask(method: str, *given: Any) -> Any:
            nonlocal asked
            asked += method == "pulse"
            return await Worker.ask(workers[0], method, *given)

        workers[0].hold, workers[0].ask = asyncio.Event(), ask
        context = Context()
        delivery = deliver(pool, context)
        await until(lambda: asked >= 5)
        assert len(context.told) <= 1  # the first look
        workers[0].hold.set()
        await delivery

    run(script)


@pytest.mark.parametrize("move", ["sleep", "wake"])
def test_an_engine_that_hangs_when_it_is_moved_is_started_again(move: str) -> None:
    async def script(pool: SamplerPool, workers: list[Any]) -> None:
        first, second = workers
        pool._patience = 0.05

        async def ask(method: str, *given: Any) -> Any:
            if method == move and second.lives == 1:
                await asyncio.Event().wait()
            return await Worker.ask(second, method, *given)

        second.ask = ask
        moving = pool.sleep() if move == "sleep" else pool.wake(Level.AWAKE)
        await asyncio.wait_for(moving, SOON)  # the other one has moved, and serves
        assert [each[0] for each in first.asked] == [move]
        assert second.failure is not None
        assert f"did not answer {move} within 0.05 s" in str(second.failure)
        await until(lambda: second.lives == 2 and second.ready)
        assert (first.synced, second.synced) == (True, False)

    run(script)


# -- generates that end early ---------------------------------------------------------------------


def test_what_was_cancelled_is_drawn_by_nobody() -> None:
    """As where the sampler could not be woken: whoever asked has its error, and engines that are
    woken later must find nothing of it."""

    async def script(pool: SamplerPool, workers: list[Any]) -> None:
        for worker in workers:
            worker.long = True
        future = generate(pool, Context())
        await until(lambda: sum(len(each.drew) for each in workers) == 4)
        future.cancel()
        with pytest.raises(asyncio.CancelledError):
            await future
        assert [each.asked for each in workers] == [[("abort", [Context.request_id])]] * 2
        assert [each.flying for each in workers] == [0, 0]

    run(script)


def test_a_cancelled_generate_ends_though_an_engine_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers, "_ABORT_SECONDS", 0.05)

    async def script(pool: SamplerPool, workers: list[Any]) -> None:
        async def ask(method: str, *given: Any) -> Any:
            await asyncio.Event().wait()

        for worker in workers:
            worker.long, worker.ask = True, ask
        future = generate(pool, Context())
        await until(lambda: sum(len(each.drew) for each in workers) == 4)
        future.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(future, SOON)

    run(script)


def aborted(given: Any) -> list[tuple[int, str, int, int]]:
    return [
        (len(each), each.finish_reason, each.first_version, each.last_version)
        for each in given.samples()
    ]


def test_an_abort_holds_though_the_engine_dies_before_it_takes_it() -> None:
    async def script(pool: SamplerPool, workers: list[Any]) -> None:
        first, second = workers
        first.long, second.synced = True, False
        context = Context()
        future = generate(pool, context)
        await until(lambda: len(first.drew) == 4)
        second.synced = True
        context.abort_signal.set()
        first.die()
        assert aborted(await future) == [(0, "abort", 0, 0)] * 4
        assert second.drew == []

    run(script)


def test_what_was_aborted_before_it_began_is_not_begun() -> None:
    async def script(pool: SamplerPool, workers: list[Any]) -> None:
        context = Context()
        context.abort_signal.set()
        assert aborted(await generate(pool, context)) == [(0, "abort", 0, 0)] * 4
        assert [each.drew for each in workers] == [[], []]

    run(script)
