"""The engine's thread: order, what happens when its core dies or is stopped; with a core that is
only a stand-in for vLLM's."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import time
import weakref
from concurrent.futures import Future
from typing import Any

import pytest

from backends.arctic.sampling.core import CoreThread
from backends.arctic.sampling.engine import SamplerEngine
from backends.arctic.sampling.flight import Drawn, Flight
from backends.arctic.sampling.settings import SampleRequest
from remote_rl import SamplingParams
from remote_rl.errors import BackendError
from remote_rl.types import Sample

PATIENCE = 60.0


class StandIn:
    """Gives every request token 7 at each step, until `error` is set."""

    def __init__(self) -> None:
        self.numbers: list[str] = []
        self.error: Exception | None = None
        self.over: str | None = None
        self.spoiled: set[str] = set()
        self.cleared = 0
        self.closed = False

    def add(self, flight: Flight, serial: int) -> None:
        assert serial == 0
        self.numbers.append(flight.number)

    def drop(self, numbers: list[str]) -> None:
        self.numbers = [each for each in self.numbers if each not in numbers]

    def step(self) -> list[Drawn]:
        if self.error is not None:
            raise self.error
        rows = {
            each: [math.nan if each in self.spoiled else -1.0, -0.5, 0.0] for each in self.numbers
        }
        return [Drawn(each, [7], [row], self.over) for each, row in rows.items()]

    def clear_cache(self) -> None:
        self.cleared += 1

    def close(self) -> None:
        self.closed = True


def _running(core: StandIn, *, paused: bool = False) -> CoreThread:
    thread = CoreThread(lambda: core)
    thread.serial, thread.served = 0, {0: (5, "label")}
    thread.paused = paused
    thread.start().result(PATIENCE)
    return thread


def _board(thread: CoreThread, number: str = "0", **params: Any) -> Future[Any]:
    landed: Future[Any] = Future()
    request = SampleRequest(
        request_id="generate",
        tokens=[1, 2],
        params=SamplingParams(**{"max_tokens": 3, **params}),
        seed=0,
        prompt_index=0,
        index=0,
    )
    flight = Flight.board(number, request, frozenset({2}), None, landed.set_result)
    thread.call(lambda: thread.board([flight])).result(PATIENCE)
    return landed


def test_a_sample_lands_at_its_length() -> None:
    thread = _running(StandIn())
    sample = _board(thread).result(PATIENCE)
    assert isinstance(sample, Sample)
    assert (sample.tokens.tolist(), sample.finish_reason) == ([7, 7, 7], "length")
    assert sample.logprobs is not None
    assert (sample.logprobs.tolist(), sample.drawn_logprobs) == ([-1, -1, -1], None)
    assert (sample.first_version, sample.label) == (5, "label")
    assert thread.drawn == 3
    thread.stop().result(PATIENCE)


def test_a_stop_id_is_kept() -> None:
    thread = _running(StandIn())
    sample = _board(thread, stop_token_ids=(7,)).result(PATIENCE)
    assert (sample.tokens.tolist(), sample.finish_reason) == ([7], "stop")
    thread.stop().result(PATIENCE)


def test_a_core_that_dies_fails_what_flies_and_what_comes() -> None:
    core = StandIn()
    thread = _running(core, paused=True)
    flying = _board(thread)
    core.error = MemoryError("no room")
    left = thread.call(thread.none_left).result(PATIENCE)
    thread.call(lambda: setattr(thread, "paused", False)).result(PATIENCE)
    failure = flying.result(PATIENCE)
    assert isinstance(failure, BackendError)
    assert "MemoryError: no room" in str(failure)
    assert "must be started again" in str(failure)
    assert failure.details["failed"] is True
    assert "in step" in failure.details["traceback"]
    left.result(PATIENCE)
    with pytest.raises(BackendError, match="must be started again"):
        thread.call(lambda: None).result(PATIENCE)
    thread.stop().result(PATIENCE)
    assert core.closed


def test_an_end_that_was_not_asked_for_is_a_failure() -> None:
    core = StandIn()
    core.over = "error"
    thread = _running(core)
    failure = _board(thread).result(PATIENCE)
    assert isinstance(failure, BackendError)
    assert "ended a sample (error) that was to go on" in str(failure)
    thread.stop().result(PATIENCE)


def test_a_sample_of_nan_fails_alone_and_leaves_no_nan_behind() -> None:
    core = StandIn()
    thread = _running(core, paused=True)
    good, bad = _board(thread, "good"), _board(thread, "bad")
    core.spoiled = {"bad"}
    thread.call(lambda: setattr(thread, "paused", False)).result(PATIENCE)
    failure = bad.result(PATIENCE)
    assert isinstance(failure, BackendError)
    assert "logits for prompt 0 are NaN after 0 tokens" in str(failure)
    assert len(good.result(PATIENCE)) == 3
    assert core.cleared == 1
    thread.stop().result(PATIENCE)


def test_a_stop_fails_what_flies() -> None:
    core = StandIn()
    thread = _running(core, paused=True)
    flying, waiting = _board(thread), thread.call(thread.none_left).result(PATIENCE)
    thread.call(lambda: setattr(thread, "closed_to_new", True)).result(PATIENCE)
    idle = _board(thread, "1")
    thread.stop().result(PATIENCE)
    for landed in (flying, idle):
        assert "was stopped" in str(landed.result(PATIENCE))
    waiting.result(PATIENCE)
    assert core.closed
    with pytest.raises(BackendError, match="was stopped"):
        thread.call(lambda: None).result(PATIENCE)


def test_a_core_that_does_not_start_says_why() -> None:
    def refuse() -> Any:
        raise BackendError("vLLM did not start")

    thread = CoreThread(refuse)
    with pytest.raises(BackendError, match="did not start"):
        thread.start().result(PATIENCE)
    thread.stop().result(PATIENCE)


def test_a_command_that_fails_or_is_withdrawn_harms_nothing() -> None:
    thread = _running(StandIn(), paused=True)
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 // 0).result(PATIENCE)
    going = threading.Event()
    held = thread.call(going.wait)
    withdrawn: Future[None] = thread.call(lambda: pytest.fail("a withdrawn command ran"))
    assert withdrawn.cancel()
    going.set()
    assert held.result(PATIENCE)
    assert thread.call(lambda: 3).result(PATIENCE) == 3
    thread.stop().result(PATIENCE)


def test_weights_of_no_version_serve_nobody() -> None:
    thread = CoreThread(StandIn)
    thread.start().result(PATIENCE)
    failure = _board(thread).result(PATIENCE)
    assert isinstance(failure, BackendError)
    assert "sync again" in str(failure)
    thread.stop().result(PATIENCE)


def test_nothing_of_a_call_that_failed_is_held() -> None:
    """Of an update those would be tensors on the device; also before the collector comes by."""
    engine = SamplerEngine()
    engine._thread = _running(StandIn())
    held: list[weakref.ref[StandIn]] = []

    def fails() -> None:
        tensors = StandIn()
        held.append(weakref.ref(tensors))
        raise BackendError("half-way")

    async def asks() -> None:
        with pytest.raises(BackendError, match="half-way"):
            await engine._call(fails)

    gc.disable()
    try:
        asyncio.run(asks())
        end = time.monotonic() + PATIENCE
        while held[0]() is not None:
            assert time.monotonic() < end
            time.sleep(0.01)
    finally:
        gc.enable()
    asyncio.run(engine.stop())
