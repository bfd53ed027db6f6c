"""Generates under faults: every sample once, and the same tokens as without."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from faults_support import PATIENCE, everything, small_mock

from remote_rl import Sample, SamplingParams, Session, connect
from remote_rl.testing import LoopbackServer
from remote_rl.testing.faults import Faults

PROMPTS = [[1, 2], [3], [4, 5, 6]]
PARAMS = SamplingParams(n=4, max_tokens=5)
Open = Callable[[Faults | None], Session]


@pytest.fixture(params=["inprocess", "http"])
def open_session(request: pytest.FixtureRequest) -> Iterator[Open]:
    """`open_session(faults)`: a session on a fresh run, over each transport."""
    sessions: list[Session] = []
    servers: list[LoopbackServer] = []

    def start(faults: Faults | None) -> Session:
        backend = small_mock(latency={"token": 0.001})
        target: Any = backend
        if request.param == "http":
            servers.append(LoopbackServer(backend))
            target = servers[-1].url
        wrap = None if faults is None else faults.wrap
        sessions.append(connect(target, wrap_transport=wrap))
        return sessions[-1]

    yield start
    for session in sessions:
        session.close()
    for server in servers:
        server.stop()


def strong(seed: int) -> Faults:
    losses = dict.fromkeys(("lose_request", "lose_response", "cut_request", "cut_response"), 0.05)
    return everything(seed, **losses, duplicate=0.2, reorder=0.1)


def tokens(groups: Any) -> list[tuple[int, int, tuple[int, ...]]]:
    return [
        (sample.prompt_index, sample.index, tuple(sample.tokens.tolist()))
        for group in groups
        for sample in group
    ]


def drawn(rl: Session) -> list[Any]:
    """Forty generates in flight at once, without seeds of their own."""
    operations = [rl.sampling.generate(PROMPTS, PARAMS) for _ in range(40)]
    return [tokens(operation.result(PATIENCE)) for operation in operations]


def test_unseeded_generates_draw_the_same_tokens_as_without_faults(open_session: Open) -> None:
    """Their seeds follow the order of the calls, whatever the order of arrival."""
    faults = strong(3)
    faulty = drawn(open_session(faults))
    assert faults.injected["duplicate"] > 5
    assert faulty == drawn(open_session(None))
    assert len({str(each) for each in faulty}) == 40


def test_an_iterated_generate_gives_every_sample_once(open_session: Open) -> None:
    rl = open_session(strong(4))
    for _ in range(8):
        operation = rl.sampling.generate(PROMPTS, PARAMS)
        samples = list(operation)
        check_samples(samples, operation.result(PATIENCE))


def test_generates_iterated_side_by_side_give_every_sample_once(open_session: Open) -> None:
    rl = open_session(strong(5))

    async def one() -> None:
        operation = rl.sampling.generate(PROMPTS, PARAMS)
        samples = [sample async for sample in operation]
        check_samples(samples, await operation)

    async def all_of_them() -> None:
        await asyncio.gather(*(one() for _ in range(12)))

    asyncio.run(all_of_them())


def check_samples(samples: list[Sample], groups: Any) -> None:
    seen = [(each.prompt_index, each.index, tuple(each.tokens.tolist())) for each in samples]
    assert sorted(seen) == tokens(groups)
    assert len(seen) == len(PROMPTS) * PARAMS.n


def test_an_abort_under_faults_ends_what_was_called_before_it(open_session: Open) -> None:
    rl = open_session(strong(6))
    rl.sampling.pause().result(PATIENCE)
    before = [rl.sampling.generate(PROMPTS, PARAMS) for _ in range(6)]
    rl.sampling.abort().result(PATIENCE)
    after = rl.sampling.generate(PROMPTS, PARAMS)
    rl.sampling.resume().result(PATIENCE)
    for operation in before:
        reasons = {each.finish_reason for group in operation.result(PATIENCE) for each in group}
        assert reasons == {"abort"}
    assert {each.finish_reason for group in after.result(PATIENCE) for each in group} == {"length"}


def test_a_pause_under_faults_holds_and_a_resume_lets_go(open_session: Open) -> None:
    rl = open_session(strong(7))
    for turn in range(10):
        rl.sampling.pause().result(PATIENCE)
        assert rl.info().result(PATIENCE).paused
        operation = rl.sampling.generate(PROMPTS, PARAMS)
        rl.weights.version().result(PATIENCE)
        assert not operation.done(), turn
        rl.sampling.resume().result(PATIENCE)
        assert len(tokens(operation.result(PATIENCE))) == len(PROMPTS) * PARAMS.n
