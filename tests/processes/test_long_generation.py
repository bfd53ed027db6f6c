"""Half an hour of a healthy generation on the server's clock, over HTTP; and late pauses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from client_double import Double
from client_server import Server
from process_support import until

from remote_rl import SamplingParams, connect, errors
from remote_rl.client import waiting
from remote_rl.messages import Submit, Waited
from remote_rl.transports.http import HttpTransport

ONE = SamplingParams(max_tokens=2)


class FastClock:
    """Half a second at each look of the watch, up to where the test lets it go."""

    def __init__(self) -> None:
        self.time = self._now = 0.0

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0.0005)
        self._now = min(self.time, self._now + 0.5)

    def go_to(self, time: float) -> None:
        self.time = time
        until("the clock is there", lambda: self._now >= time)


class Signs:
    """Counts the waits that have come back to the client."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits = 0
        original = HttpTransport.call

        async def call(transport: Any, message: Any, *arguments: Any, **named: Any) -> Any:
            reply = await original(transport, message, *arguments, **named)
            self.waits += isinstance(reply, Waited)
            return reply

        monkeypatch.setattr(HttpTransport, "call", call)


def test_half_an_hour_of_a_healthy_generation_is_never_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Leases of 60 s and a stall_timeout of 300 s pass many times over; the client asks for the
    outcome again and again, each time for as long as a wait lasts."""
    monkeypatch.setattr(waiting, "_WAIT", 0.3)
    signs, clock, double = Signs(monkeypatch), FastClock(), Double()
    contexts = []
    generate = double.generate

    async def watched(request: Any, context: Any) -> Any:
        contexts.append(context)
        return await generate(request, context)

    double.generate = watched  # type: ignore[method-assign]
    hold = double.hold("generate")
    server = Server(double, clock=clock)
    try:
        with connect(server.url) as rl:
            healthy = rl.sampling.generate([[1]], ONE)
            assert hold.reached.wait(60)
            for step in range(1, 91):
                clock.go_to(20.0 * step)
                contexts[0].progress(step, 90, "decoding")
                rl.info().result(60)  # as the client's own renewal, each third of a lease
                assert not healthy.done()
            assert clock.now() == 1800
            until("it has asked often", lambda: signs.waits > 20)
            report = healthy.progress
            assert report is not None
            assert report.what == "decoding"
            hold.open()
            assert len(healthy.result(60)[0]) == 1
    finally:
        server.stop()


def test_without_signs_of_life_it_is_cut_at_the_stall_timeout() -> None:
    clock, double = FastClock(), Double()
    hold = double.hold("generate")
    server = Server(double, clock=clock, lease_seconds=1e6)
    try:
        with connect(server.url) as rl:
            silent = rl.sampling.generate([[1]], ONE)
            assert hold.reached.wait(60)
            clock.go_to(299.0)
            rl.info().result(60)
            assert not silent.done()
            clock.go_to(301.0)
            with pytest.raises(errors.StalledError, match="generate reported nothing for 300 s"):
                silent.result(60)
    finally:
        server.stop()


def test_a_pause_that_arrives_late_does_not_stop_sampling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its resume was called after it and arrived before it."""
    original = HttpTransport.call
    late = asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def call(transport: Any, message: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(message, Submit) and message.operation == "pause":
            loops.append(asyncio.get_running_loop())
            await late.wait()
        return await original(transport, message, *arguments, **named)

    monkeypatch.setattr(HttpTransport, "call", call)
    double = Double()
    server = Server(double)
    try:
        with connect(server.url) as rl:
            pause = rl.sampling.pause()
            rl.sampling.resume().result(60)
            loops[0].call_soon_threadsafe(late.set)
            pause.result(60)
            assert not rl.info().result().paused
            assert len(rl.sampling.generate([[1]], ONE).result(60)[0]) == 1
            assert "pause" not in double.names()
    finally:
        server.stop()
