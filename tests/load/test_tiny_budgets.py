"""A client with hardly any room gets everything done, in order, and asks no more often than it
must."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from load_backend import Light
from load_server import Served

from remote_rl import AdamW, Batch, SamplingParams, Session, connect, losses
from remote_rl.dispatcher import Dispatcher
from remote_rl.errors import OperationCancelled
from remote_rl.messages import Message
from remote_rl.testing import MockServer
from remote_rl.transports.http import HttpTransport
from remote_rl.transports.inprocess import InProcessTransport

Serve = Callable[..., Served]
BATCH = Batch(prompts=[[1, 2]], prompt_index=[0], responses=[[1, 2, 3]], temperature=1.0)
PARAMS = SamplingParams(n=2, max_tokens=8)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, str]]:
    """How often each message was answered how, over any transport, as class names."""
    counted: Counter[tuple[str, str]] = Counter()
    for transport in (InProcessTransport, HttpTransport):
        original = transport.call

        async def call(
            self: Any, message: Message, timeout: float, original: Any = original
        ) -> Any:
            answer = await original(self, message, timeout)
            counted[type(message).__name__, type(answer).__name__] += 1
            return answer

        monkeypatch.setattr(transport, "call", call)
    return counted


@pytest.fixture(params=["inprocess", "http"])
def crammed(
    request: pytest.FixtureRequest, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Session]:
    """`crammed(backend, budget)`: a session whose run keeps so little for it."""

    def start(backend: Light, budget: int = 1) -> Session:
        if request.param == "http":
            return connect(serve(backend, budget_bytes=budget).url)
        inside: Any = backend
        defaults: Any = Dispatcher.__init__.__kwdefaults__
        monkeypatch.setitem(defaults, "budget_bytes", budget)
        return connect(inside)

    return start


def by_hand(function: Any = None) -> losses.Loss:
    """A loss of the caller's own."""

    def zero(batch: Batch, outputs: dict[str, Any]) -> Any:
        if function is not None:
            function()
        return 0.0, {"logprobs": np.zeros_like(outputs["logprobs"])}

    return losses.custom(zero, framework=None)


@pytest.mark.parametrize("budget", [1, 300])
def test_a_mixed_pipeline_never_locks_up(
    budget: int, crammed: Callable[..., Session], answers: Counter[tuple[str, str]]
) -> None:
    backend = Light()
    expected: list[tuple[str, Any]] = []
    with crammed(backend, budget) as rl:
        operations: list[Any] = []
        for step in range(12):
            operations += [rl.sampling.generate([[1, 2]] * 3, PARAMS) for _ in range(4)]
            operations.append(rl.training.forward_backward(BATCH, by_hand()))
            operations.append(rl.training.forward_backward(BATCH, losses.CrossEntropy(scale=step)))
            operations.append(rl.training.optim_step(AdamW(lr=step)))
            operations.append(rl.weights.push({"w": np.zeros(100, np.float32)}, label=step))
            expected += [
                *(("forward", None), ("forward_backward", "cotangents")),
                *(("forward_backward", step), ("optim_step", step), ("push", step)),
            ]
        for operation in reversed(operations):
            operation.result(120)
        assert backend.log == expected
    submits = sum(count for (message, _), count in answers.items() if message == "Submit")
    busy = answers["Submit", "Busy"]
    assert busy > 0
    assert submits - busy == len(operations) + 12  # each forward of a custom loss is one more
    assert submits < 12 * len(operations)  # no hot loop


def test_the_function_of_a_loss_may_generate_while_what_comes_after_it_fills_the_room(
    crammed: Callable[..., Session],
) -> None:
    backend = Light()
    with crammed(backend) as rl:
        later: list[Any] = []
        called = threading.Event()

        def function() -> None:
            assert called.wait(60)
            drawn = [rl.sampling.generate([[1]], PARAMS) for _ in range(3)]
            assert all(len(each.result(60)[0]) == 2 for each in drawn)

        loss = rl.training.forward_backward(BATCH, by_hand(function))
        later += [rl.training.forward_backward(BATCH, losses.CrossEntropy()) for _ in range(20)]
        called.set()
        loss.result(120)
        for operation in later:
            operation.result(120)


def test_a_loss_that_fails_holds_nothing_up(crammed: Callable[..., Session]) -> None:
    def fail() -> None:
        raise ValueError("by hand")

    with crammed(Light()) as rl:
        loss = rl.training.forward_backward(BATCH, by_hand(fail))
        later = [rl.training.forward(BATCH) for _ in range(20)]
        with pytest.raises(ValueError, match="by hand"):
            loss.result(60)
        for operation in later:
            operation.result(120)


def test_results_that_nobody_looks_at_hold_nothing_up(crammed: Callable[..., Session]) -> None:
    """An outcome is acknowledged as it arrives, not as it is asked for."""
    with crammed(Light()) as rl:
        operations: list[Any] = [rl.training.forward(BATCH) for _ in range(50)]
        operations += [rl.sampling.generate([[1]], PARAMS) for _ in range(50)]
        operations[-1].result(120)
        operations[49].result(120)


def test_samples_come_one_by_one_however_little_room_there_is(
    crammed: Callable[..., Session],
) -> None:
    with crammed(Light(tokens=8)) as rl:
        streams = [rl.sampling.generate([[1]] * 4, PARAMS) for _ in range(5)]
        for operation in reversed(streams):
            assert len(list(operation)) == 8


def test_what_waits_for_room_can_be_cancelled(crammed: Callable[..., Session]) -> None:
    backend = Light(holds=True)
    with crammed(backend) as rl:
        operations = [rl.sampling.generate([[1]], PARAMS) for _ in range(8)]
        for operation in operations[2:]:
            operation.cancel()
        for operation in operations[2:]:
            with pytest.raises(OperationCancelled):
                operation.result(60)
        backend.let_go()
        assert all(len(operation.result(60)[0]) == 2 for operation in operations[:2])


def test_an_abort_reaches_what_waits_for_room(
    crammed: Callable[..., Session], answers: Counter[tuple[str, str]]
) -> None:
    """It must not wait for room itself: it is what makes it."""
    backend = Light(holds=True)
    with crammed(backend) as rl:
        operations = [rl.sampling.generate([[1]], PARAMS) for _ in range(8)]
        rl.sampling.abort().result(60)
        reasons = [
            [sample.finish_reason for sample in operation.result(60)[0]] for operation in operations
        ]
        assert {each[-1] for each in reasons} == {"abort"}
        assert len(rl.sampling.generate([[1]], PARAMS).request_id) > 0
        backend.let_go()
    assert answers["Submit", "Busy"] > 0


def test_a_pause_and_a_close_end_where_generates_wait_for_room(
    crammed: Callable[..., Session],
) -> None:
    backend = Light(holds=True)
    rl = crammed(backend)
    rl.sampling.pause().result(60)
    operations = [rl.sampling.generate([[1]], PARAMS) for _ in range(8)]
    rl.sampling.resume().result(60)
    rl.info().result(60)
    assert not any(operation.done() for operation in operations)
    backend.let_go()
    rl.close()
    assert all(operation.done() for operation in operations)


def test_a_loop_can_be_tested_against_a_server_with_hardly_any_room() -> None:
    with MockServer(budget_bytes=100) as server, connect(server.url) as rl:
        for _ in range(20):
            rl.training.forward_backward(BATCH, losses.CrossEntropy())
        steps = [rl.sampling.generate([[1, 2]], PARAMS) for _ in range(20)]
        assert rl.training.optim_step(AdamW(lr=0.1)).result(60).version == 1
        for step in steps:
            step.result(60)
        assert server.dispatcher.statistics.busy > 0
    assert server.calls.count("forward_backward") == 20
