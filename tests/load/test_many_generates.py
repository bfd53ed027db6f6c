"""2,000 generates in flight from one client over a few connections, others at work meanwhile."""

from __future__ import annotations

import concurrent.futures
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from load_backend import Light
from load_server import Served, wait_until

from remote_rl import AdamW, Batch, SamplingParams, Session, connect, losses

Serve = Callable[..., Served]
MANY = 2000
BATCH = Batch(prompts=[[1, 2]], prompt_index=[0], responses=[[1, 2, 3]], temperature=1.0)
PARAMS = SamplingParams(n=2, max_tokens=4)


def step(rl: Session, label: int) -> int:
    """What a loop does between generates; the version that it ends with."""
    rl.training.forward_backward(BATCH, losses.CrossEntropy())
    rl.training.optim_step(AdamW(lr=0.1))
    return rl.weights.sync(label=label).result(60).version


def test_2000_generates_in_flight_over_at_most_8_connections_all_complete(serve: Serve) -> None:
    backend = Light(holds=True)
    server = serve(backend)
    began = time.monotonic()
    with connect(server.url) as rl:
        operations = [rl.sampling.generate([[1, 2]], PARAMS) for _ in range(MANY)]
        wait_until(lambda: backend.held == MANY)  # all at once, and the client still answers
        assert rl.info().result(60).backend == "light"
        assert step(rl, 1) == 1
        streamed = [iter(operation) for operation in operations[::100]]
        assert [next(samples).index for samples in streamed] == [0] * len(streamed)
        assert not any(operation.done() for operation in operations)
        backend.let_go()
        assert [[sample.index for sample in samples] for samples in streamed] == [[1]] * 20
        for operation in operations:
            assert [sample.finish_reason for sample in operation.result(120)[0]] == ["stop"] * 2
        assert server.most_connections <= 8
        wait_until(lambda: server.kept() == {rl._connection.client_id: 0})
    assert backend.most_held == MANY
    assert time.monotonic() - began < 60


def test_other_clients_work_on_meanwhile(serve: Serve) -> None:
    """A client with 2,000 in flight takes nothing from the others."""
    backend = Light(holds=True)
    server = serve(backend)
    with connect(server.url) as rl:
        operations = [rl.sampling.generate([[1, 2]], PARAMS) for _ in range(MANY)]

        def work(number: int) -> int:
            with connect(rl.handle()) as member:
                for _ in range(10):
                    member.training.forward(BATCH).result(60)
                    member.training.zero_grad().result(60)
                held = [member.sampling.generate([[1]], PARAMS) for _ in range(50)]
                wait_until(lambda: backend.held >= MANY)
                member.sampling.abort(held).result(60)
                return sum(len(operation.result(60)[0]) for operation in held)

        with concurrent.futures.ThreadPoolExecutor(2) as others:
            assert list(others.map(work, range(2))) == [100, 100]
        assert not any(operation.done() for operation in operations)
        backend.let_go()
        assert sum(len(operation.result(120)[0]) for operation in operations) == 2 * MANY
    assert Counter(name for name, _ in backend.log) == {"forward": 20, "zero_grad": 20}


@pytest.mark.parametrize("ending", ["close", "abort", "cancel"])
def test_2000_generates_that_are_in_flight_end_together(serve: Serve, ending: str) -> None:
    backend = Light(holds=True)
    server = serve(backend)
    rl: Any = connect(server.url)
    operations = [rl.sampling.generate([[1, 2]], PARAMS) for _ in range(MANY)]
    if ending == "abort":
        rl.sampling.abort().result(120)
        assert backend.held == 0
        assert all(operation.result(120)[0][1].finish_reason == "abort" for operation in operations)
    elif ending == "cancel":
        for operation in operations:
            operation.cancel()
        for operation in operations:
            assert operation._call.ending.wait(120)
            assert operation._call.error is not None
    else:
        wait_until(lambda: backend.held == MANY)
        backend.let_go()
    rl.close()
    assert all(operation.done() for operation in operations)
