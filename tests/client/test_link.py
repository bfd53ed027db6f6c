"""When a client gives up a message, its server or its lease, on a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from backends.mock import create
from remote_rl.client import link as module
from remote_rl.client.link import Link
from remote_rl.client.seen_checkpoints import SeenCheckpoints
from remote_rl.dispatcher import Dispatcher
from remote_rl.errors import LeaseError, UnreachableError
from remote_rl.messages import ConnectionLost, Grant, Renew, Renewed, Wait
from remote_rl.run_info import CheckpointList
from remote_rl.types.results import CheckpointInfo, LoadResult


class Time:
    """The link's clock; its sleeps move it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        sleep = asyncio.sleep

        async def slept(seconds: float) -> None:
            self.now += seconds
            await sleep(0)

        monkeypatch.setattr(module.asyncio, "sleep", slept)


class Line:
    """A transport whose answers are what the test says of a message and the time."""

    target, submits = "http://there", 1

    def __init__(self, answer: Callable[[Any, float], Any]) -> None:
        self.answer = answer
        self.patience: list[float] = []

    async def call(self, message: Any, timeout: float) -> Any:
        self.patience.append(timeout)
        reply = self.answer(message, timeout)
        if isinstance(reply, BaseException):
            raise reply
        return reply

    def digest(self, request: Any) -> None:
        return None

    async def close(self) -> None:
        pass


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


def linked(answer: Callable[[Any, float], Any], lease: float = 60.0) -> Link:
    grant = Grant(
        client_id="c",
        instance_id="i",
        epoch=1,
        role="driver",
        lease_seconds=lease,
        info=Dispatcher(create()).info(),
    )
    return Link(Line(answer), grant)


def renewed(link: Link) -> Coroutine[Any, Any, Any]:
    return link.talk(lambda leased: Renew(**leased), 20.0)


REFUSED = ConnectionLost("refused", refused=True)
ALIVE = Renewed(lease_seconds=60)


def test_an_address_that_refuses_for_ten_seconds_is_given_up(time: Time) -> None:
    link = linked(lambda message, timeout: REFUSED)
    time.now = 45.0  # however long nothing was said before
    with pytest.raises(UnreachableError, match="nothing listens at http://there any more"):
        asyncio.run(renewed(link))
    assert 55 <= time.now <= 56


def test_an_address_that_is_known_to_have_ended_is_given_up_at_once(time: Time) -> None:
    link = linked(lambda message, timeout: ConnectionLost("died", refused=True, ended=True))
    with pytest.raises(UnreachableError, match=r"nothing listens at .* any more \(died\)"):
        asyncio.run(renewed(link))
    assert time.now == 0


def test_a_refusal_between_other_losses_is_none(time: Time) -> None:
    """A gateway may refuse for a moment; only an unbroken row of refusals tells of an end."""
    tries = 0

    def answer(message: Any, timeout: float) -> Any:
        nonlocal tries
        tries += 1
        return ConnectionLost("a time-out") if tries % 8 == 0 else REFUSED

    with pytest.raises(UnreachableError, match="has not answered for"):
        asyncio.run(renewed(linked(answer)))
    assert 60 < time.now < 70


def test_a_server_that_comes_back_is_spoken_to_again(time: Time) -> None:
    link = linked(lambda message, timeout: ALIVE if 9 < time.now < 12 else REFUSED)
    assert asyncio.run(renewed(link)) == ALIVE
    time.now = 12.0
    with pytest.raises(UnreachableError):
        asyncio.run(renewed(link))
    assert time.now > 22  # it counts anew


def test_silence_lasts_a_leases_length_and_one_last_try(time: Time) -> None:
    def answer(message: Any, timeout: float) -> Any:
        time.now += timeout
        return ConnectionLost(f"no answer within {timeout:g} s")

    link = linked(answer)
    with pytest.raises(UnreachableError, match="this client's lease has ended"):
        asyncio.run(renewed(link))
    assert 65 <= time.now < 86
    assert link.transport.patience[-1] <= 5  # type: ignore[attr-defined]


def test_a_client_that_stood_still_itself_asks_once_more(time: Time) -> None:
    """On waking up, its own time-out tells nothing of the other side; the answer does."""
    refusal = LeaseError("client c holds no lease of the run")

    def answer(message: Any, timeout: float) -> Any:
        if time.now == 0:
            time.now = 3600.0
            return ConnectionLost("no answer within 20 s")
        return refusal

    with pytest.raises(LeaseError):
        asyncio.run(renewed(linked(answer)))


def test_a_message_that_never_passes_while_others_do_is_given_up(time: Time) -> None:
    """A gateway with a limit on size: the client would try for ever, its lease renewed."""

    def answer(message: Any, timeout: float) -> Any:
        return ConnectionLost("HTTP 502") if isinstance(message, Renew) else ALIVE

    link = linked(answer)

    async def both() -> None:
        stuck = asyncio.ensure_future(renewed(link))
        while not stuck.done():
            await link.talk(lambda leased: Wait(timeout=1, **leased), 10.0)
            await asyncio.sleep(0.5)
        await stuck

    with pytest.raises(UnreachableError, match=r"a Renew to http://there was lost \d+ times"):
        asyncio.run(both())
    assert 120 <= time.now < 130


def test_a_wait_that_a_gateway_cuts_short_is_asked_again(time: Time) -> None:
    """It may last as long as an operation does, as long as anything else arrives."""

    def answer(message: Any, timeout: float) -> Any:
        if isinstance(message, Wait) and time.now < 1800:
            time.now += 10
            return ConnectionLost("HTTP 504")
        return ALIVE

    link = linked(answer)

    async def both() -> Any:
        waiting = asyncio.ensure_future(link.talk(lambda leased: Wait(timeout=20, **leased), 30.0))
        while not waiting.done():
            await renewed(link)
            await asyncio.sleep(1)
        return await waiting

    assert asyncio.run(both()) == ALIVE


def test_a_client_with_nothing_under_way_notices_the_end(time: Time) -> None:
    """It probes; and where a message is under way, its loss tells and the lease alone is kept."""
    link = linked(lambda message, timeout: ALIVE if time.now < 100 else REFUSED)
    with pytest.raises(UnreachableError, match="its server has ended"):
        asyncio.run(link.keep_lease())
    assert time.now < 115


def info(name: str, created: float) -> CheckpointInfo:
    return CheckpointInfo(name=name, version=1, optimizer=True, created=created)


def test_the_last_checkpoint_is_the_one_saved_last_of_those_seen() -> None:
    seen = SeenCheckpoints()
    assert seen.last is None
    assert seen.start_hint == "start='base' (this client saw no checkpoint)"
    seen.note(LoadResult(name="old", version=2, saved_version=1, optimizer=True))
    assert seen.last == "old"
    seen.note(info("a", 10.0))
    seen.note(info("b", 20.0))
    seen.note(LoadResult(name="a", version=3, saved_version=1, optimizer=True))
    assert seen.last == "b"  # what is loaded again was not saved again
    seen.forget("b")
    assert seen.last == "a"
    seen.note(CheckpointList(checkpoints=(info("a", 10.0), info("c", 30.0))))
    assert seen.last == "c"
    seen.forget("never seen")
    seen.note("anything else")
    assert seen.start_hint == "start='c', the last checkpoint that this client saw"
