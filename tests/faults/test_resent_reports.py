"""What users of other stacks reported of retries (shared/facts/field.md names the issues), one test
each, over both transports, with answers that are lost after the execution and messages that come
twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from faults_support import BATCHES, LOSS, PATIENCE, small_mock

from remote_rl import AdamW, Session, connect
from remote_rl.testing import LoopbackServer
from remote_rl.testing.faults import Faults

Open = Callable[[Faults | None], tuple[Session, Any]]
OPTIMIZER = AdamW(lr=0.1)


def resending() -> Faults:
    """Half of all answers are lost, and every message comes twice."""
    return Faults(seed=1, lose_response=0.5, duplicate=1)


@pytest.fixture(params=["inprocess", "http"])
def open_session(request: pytest.FixtureRequest) -> Iterator[Open]:
    """`open_session(faults)`: a session on a fresh run, and the run's backend."""
    sessions: list[Session] = []
    servers: list[LoopbackServer] = []

    def start(faults: Faults | None) -> tuple[Session, Any]:
        backend = small_mock()
        target: Any = backend
        if request.param == "http":
            servers.append(LoopbackServer(backend))
            target = servers[-1].url
        sessions.append(connect(target, wrap_transport=None if faults is None else faults.wrap))
        return sessions[-1], backend

    yield start
    for session in sessions:
        session.close()
    for server in servers:
        server.stop()


def calls(backend: Any, operation: str) -> int:
    return sum((call.operation, call.event) == (operation, "started") for call in backend.calls)


def test_a_resent_forward_backward_doubles_the_gradient__skyrl_2035(open_session: Open) -> None:
    norms = []
    for faults in (None, resending()):
        rl, backend = open_session(faults)
        for batch in BATCHES:
            rl.training.forward_backward(batch, LOSS)
        norms.append(rl.training.optim_step(OPTIMIZER).result(PATIENCE).grad_norm)
        assert calls(backend, "forward_backward") == len(BATCHES)
    assert faults is not None
    assert faults.injected["lose_response"] > 3
    assert norms[0] == norms[1]


def test_a_resent_optim_step_takes_two_steps__skyrl_2035(open_session: Open) -> None:
    ends = []
    for faults in (None, resending()):
        rl, backend = open_session(faults)
        for batch in BATCHES:
            rl.training.forward_backward(batch, LOSS)
            step = rl.training.optim_step(OPTIMIZER)
        result = step.result(PATIENCE)
        logprobs = rl.training.forward(BATCHES[0]).result(PATIENCE).logprobs
        ends.append((result.version, result.metrics["optimizer_steps"], logprobs))
        assert calls(backend, "optim_step") == len(BATCHES)
    assert ends[0] == ends[1]
    assert ends[0][:2] == (len(BATCHES), len(BATCHES))


def test_deduplication_clashes_between_clients__skyrl_2094() -> None:
    """Driver and members send the same requests under the same numbers at the same time: none is
    taken for a repetition of another client's."""
    backend = small_mock()
    server = LoopbackServer(backend)
    try:
        with connect(server.url, wrap_transport=resending().wrap) as driver:
            handle = driver.handle()
            with (
                connect(handle, wrap_transport=resending().wrap) as first,
                connect(handle, wrap_transport=resending().wrap) as second,
            ):
                clients = (driver, first, second)
                pending = [
                    rl.training.forward_backward(BATCHES[1], LOSS)
                    for _ in range(5)
                    for rl in clients
                ]
                values = {operation.result(PATIENCE).value for operation in pending}
                tripled = driver.training.optim_step(OPTIMIZER).result(PATIENCE).grad_norm
        assert len(values) == 1
        assert calls(backend, "forward_backward") == 15
    finally:
        server.stop()
    with connect(small_mock()) as alone:
        for _ in range(15):
            alone.training.forward_backward(BATCHES[1], LOSS)
        assert alone.training.optim_step(OPTIMIZER).result(PATIENCE).grad_norm == tripled
