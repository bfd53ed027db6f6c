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
from backends.arctic.samplers import SamplerPool
from remote_rl import SamplingParams
from remote_rl.errors import BackendError
from remote_rl.requests import Generate
from remote_rl.types import Ragged, Sample

SOON = 10.0


class Worker:
    """A `SamplerWorker` whose engine is a test's. hold: what an update waits for."""

    def __init__(self, number: int, *given: Any) -> None:
        self.name, self._died = f"engine {number}", given[-1]
        self.ready = self.synced = False
        self.flying = self.lives = 0
        self.process: int | None = None
        self.failure: BackendError | None = None
        self.drawn = 0
        self.hold: asyncio.Event | None = None
        self.drew: list[int] = []

    async def start(self, version: int | None, heard: Callable[[], None]) -> Mapping[str, Any]:
        self.lives += 1
        self.process = self.lives
        self.ready, self.synced = True, version is not None
        return {}

    def die(self) -> None:
        self.end()
        self.failure = BackendError("it died", worker=self.name, died=True)
        self._died()

    def end(self) -> None:
        self.ready = self.synced = False
        self.process = None

    async def ask(self, method: str, *given: Any) -> Any:
        if method == "pulse":
            return self.drawn
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
        prompts = Ragged.from_rows([np.zeros(1, np.int32)] * 4, np.int32)
        request = Generate(prompts=prompts, params=SamplingParams(max_tokens=1))
        await pool.generate(request, Context())  # type: ignore[arg-type]
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
