"""Workers that hang and are given up: what they were asked says why. They are stood for by what
answers as they do once Ray has killed them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from backends.arctic.config import ArcticConfig
from backends.arctic.halves import TrainingHalf
from backends.arctic.placing import Level
from backends.arctic.sampler_worker import SamplerWorker
from backends.arctic.trainers import TrainerGroup
from remote_rl.errors import BackendError

SOON = 10.0
CONFIG = ArcticConfig(model="any", training={"ranks": 2})
#: knows of no output
CLUSTER: Any = SimpleNamespace(last_words=lambda process: "")
CONTEXT: Any = SimpleNamespace(progress=lambda *told: None)


class Hanging:
    """An actor that answers nothing until it is killed."""

    def __init__(self) -> None:
        self.run = self.pulse = self.here = SimpleNamespace(remote=self._answer)
        self._killed = asyncio.Event()

    async def _answer(self, *given: Any) -> Any:
        await self._killed.wait()
        raise ActorDiedError

    def kill(self) -> None:
        self._killed.set()


@pytest.fixture(autouse=True)
def kills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.kill", lambda actor: actor.kill())


async def asked(work: Any, give_up: Callable[[], None]) -> str:
    """What it fails with."""
    asking = asyncio.ensure_future(work)
    await asyncio.sleep(0)
    assert not asking.done()
    give_up()
    with pytest.raises(BackendError) as caught:
        await asking
    return str(caught.value)


def test_an_engine_that_is_given_up_is_started_again_once() -> None:
    async def script() -> None:
        deaths: list[str] = []
        worker = SamplerWorker(0, CONFIG, CLUSTER, lambda: deaths.append("died"))
        worker._actor, worker.ready = Hanging(), True

        async def update() -> None:
            try:
                await worker.ask("update")
            finally:
                assert not worker.updating

        why = await asked(update(), lambda: worker.give_up("has not answered for 9 s"))
        assert why.startswith("sampling engine 0 has not answered for 9 s; it was ended, and")
        assert worker.failure is not None
        assert worker.failure.details["died"] is True
        worker._actor = again = Hanging()  # which starts now
        worker.give_up("has not answered for 9 s")
        assert not again._killed.is_set()
        assert deaths == ["died"]

    asyncio.run(script())


def test_ranks_that_are_given_up_say_why_now_and_later() -> None:
    async def script() -> None:
        group = TrainerGroup(CONFIG, CLUSTER)
        group._actors = [Hanging(), Hanging()]

        def give_up() -> None:
            for seconds in (9, 10):
                group.give_up(f"the ranks did nothing for {seconds} s")

        why = await asked(group.everywhere("broadcast", context=CONTEXT), give_up)
        assert why.startswith("the ranks did nothing for 9 s, and they were ended; load a")
        with pytest.raises(BackendError) as caught:
            await group.everywhere("forward", context=CONTEXT)
        assert str(caught.value) == why

    asyncio.run(script())


@pytest.mark.parametrize("hung", ["here", "run"])
@pytest.mark.parametrize("move", ["sleep", "wake"])
def test_ranks_that_hang_when_they_are_moved_are_ended(hung: str, move: str) -> None:
    async def script() -> None:
        group = TrainerGroup(CONFIG, CLUSTER)
        actors = group._actors = [Hanging(), Hanging()]
        if hung == "run":
            for each in actors:
                each.here = SimpleNamespace(remote=_at_once)
        half = TrainingHalf(group, patience=0.05)
        moving = half.sleep() if move == "sleep" else half.wake(Level.AWAKE)
        if hung == "run":
            with pytest.raises(BackendError, match=f"ranks did not {move} within 0.05 s, and"):
                await asyncio.wait_for(moving, SOON)
        else:  # ranks that are gone have nothing to move, and their next operation says why
            await asyncio.wait_for(moving, SOON)
        assert all(each._killed.is_set() for each in actors)
        with pytest.raises(BackendError, match=f"ranks did not {move} within 0.05 s, and"):
            await group.everywhere("forward", context=CONTEXT)

    asyncio.run(script())


async def _at_once() -> None: ...
