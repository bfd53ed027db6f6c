"""A client's process is killed: its rights end with its lease, not before and not later."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from process_support import Playground, until

from remote_rl import SamplingParams, connect
from remote_rl.messages import Attach, Occupied
from remote_rl.protocol import PROTOCOL_VERSIONS
from remote_rl.transports.http import HttpTransport

BATCH = "Batch(prompts=[[1]], prompt_index=[0], responses=[[2, 3]], temperature=1.0)"
STEP = f"""
rl.training.forward_backward({BATCH}, losses.CrossEntropy())
steps = [rl.training.optim_step(AdamW(lr=0.1))]
steps.append(rl.training.snapshot("held"))
rl.info().result()
"""


def lease_left(url: str) -> float:
    """How long the present driver's lease may last, without taking part."""

    async def ask() -> Any:
        transport = HttpTransport(url)
        try:
            asked = Attach(client_id="asks", protocol_versions=PROTOCOL_VERSIONS, start="current")
            return await transport.call(asked, 30)
        finally:
            await transport.close()

    answer = asyncio.run(ask())
    assert isinstance(answer, Occupied), answer
    return answer.remaining


def test_the_next_driver_is_let_in_when_the_lease_of_a_killed_one_ends(
    playground: Playground, caplog: pytest.LogCaptureFixture
) -> None:
    server = playground.server("--lease", "3", backend="staged")
    stage = playground.stage
    stage.hold("forward_backward-1-before")
    killed = playground.puppet(server.url)
    killed.do(STEP)
    stage.reached("forward_backward-1-before")
    killed.kill()
    left = lease_left(server.url)
    begin = time.monotonic()
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(1) as thread:
        connecting = thread.submit(connect, server.url, start="current")
        until("the next one is let in", lambda: "epoch 2" in server.log.read_text())
        waited = time.monotonic() - begin
        # its pause between two questions is a second
        assert left - 0.2 <= waited <= left + 5, (left, waited)
        # what ran goes on to its end; what waited behind it never begins
        assert stage.passed() == ["forward_backward-1-before"]
        stage.release("forward_backward-1-before")
        with connecting.result(60) as rl:
            rl.training.snapshot("held").result(60)
            assert rl.weights.version().result().trainer == 0
    assert "another driver holds" in caplog.text
    assert "for its lease to run out" in caplog.text
    assert [point for point in stage.passed() if point.endswith("after")] == [
        *("forward_backward-1-after", "zero_grad-1-after", "snapshot-1-after")
    ]


def test_a_killed_member_takes_nothing_with_it_but_its_own(playground: Playground) -> None:
    server = playground.server("--lease", "2", backend="staged", latency={"token": 60.0})
    stage = playground.stage
    with connect(server.url) as driver:
        member = playground.puppet(driver.handle().to_json())
        member.do("rl.sampling.pause().result()")
        member.do("drawn = rl.sampling.generate([[1]], SamplingParams(max_tokens=9))")
        stage.reached("generate-1-before")
        member.kill()
        assert driver.info().result().paused
        epoch = driver._connection.grant.epoch
        until("the pause is lifted", lambda: not driver.info().result().paused)
        stage.reached("generate-1-after")  # told to end early, it has
        assert stage.passed().count("resume-1-after") == 1
        stage.hold("generate-2-before")
        mine = driver.sampling.generate([[1]], SamplingParams(max_tokens=1))
        stage.reached("generate-2-before")
        mine.cancel()
        driver.training.zero_grad().result()
        assert driver._connection.grant.epoch == epoch
        stage.release("generate-2-before")
