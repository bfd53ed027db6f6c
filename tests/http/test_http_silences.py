"""The silences of a transport's calls share one timer, and each ends by its own time."""

from __future__ import annotations

import asyncio

import pytest
from http_support import LONG, in_loop

from remote_rl.transports.silence import Silences


async def silent(silences: Silences, seconds: float) -> None:
    with silences.watch(seconds):
        await asyncio.Event().wait()


@in_loop
async def test_a_call_in_which_nothing_moves_ends_in_a_timeout() -> None:
    silences = Silences()
    with pytest.raises(TimeoutError):
        await silent(silences, 0.01)
    assert not silences.heard


@in_loop
async def test_a_short_one_does_not_wait_for_the_timer_of_a_long_one() -> None:
    silences = Silences()
    long = asyncio.ensure_future(silent(silences, LONG))
    await asyncio.sleep(0)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await silent(silences, 0.01)
    assert not long.done()
    long.cancel()
    with pytest.raises(asyncio.CancelledError):
        await long
    assert not silences.heard
    silences.close()


@in_loop
async def test_all_that_are_over_at_once_end() -> None:
    silences = Silences()
    calls = [silent(silences, 0.01) for _ in range(20)]
    ended = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(error) for error in ended} == {TimeoutError}


@in_loop
async def test_one_that_has_moved_has_its_whole_time_again() -> None:
    silences = Silences()
    with silences.watch(0.05) as silence:
        first = silence.end
        while silences.loop.time() < first + 0.02:  # past its first end, if nothing had moved
            silence.moved()
            await asyncio.sleep(0)
        assert silence.end > first
    assert not silence.over
    silences.close()


@in_loop
async def test_a_call_that_was_cancelled_as_well_stays_cancelled() -> None:
    silences = Silences()

    async def both() -> None:
        with silences.watch(LONG) as silence:
            silence.ring()
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        await asyncio.ensure_future(both())
    silences.close()


@in_loop
async def test_a_call_that_ends_in_time_is_not_cancelled_later() -> None:
    silences = Silences()
    with silences.watch(0.01) as silence:
        pass
    with pytest.raises(TimeoutError):
        await silent(silences, 0.02)  # until after the first one's time
    assert not silence.over
