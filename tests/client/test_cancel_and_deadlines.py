"""Cancelling, and deadlines on a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from client_double import Double, Hold
from client_server import Server
from client_support import Doorkeeper, ServerFactory

from remote_rl import AdamW, Batch, Operation, SamplingParams, Session, connect, losses
from remote_rl.errors import (
    DeadlineExceededError,
    DirtyGradientsError,
    OperationCancelled,
)
from remote_rl.messages import Submit

LOSS = losses.CrossEntropy()
PARAMS = SamplingParams(n=2, max_tokens=2)


def test_a_queued_operation_that_is_cancelled_never_runs(
    rl: Session, double: Double, batch: Batch
) -> None:
    hold = double.hold("forward")
    rl.training.forward(batch)
    assert hold.reached.wait(60)
    queued = rl.training.snapshot("never")
    queued.cancel()
    with pytest.raises(OperationCancelled, match="snapshot was cancelled before it started"):
        queued.result(60)  # it ends at once, though its turn never came
    hold.open()
    rl.training.snapshot("after").result()
    assert double.log == [("forward", "current"), ("snapshot", "after")]


def test_a_cancelled_forward_backward_counts_as_failed(
    rl: Session, double: Double, batch: Batch
) -> None:
    hold = double.hold("forward")
    rl.training.forward(batch)
    assert hold.reached.wait(60)
    first = rl.training.forward_backward(batch, LOSS)
    second = rl.training.forward_backward(batch, LOSS)
    step = rl.training.optim_step(AdamW(lr=0.1))
    second.cancel()
    with pytest.raises(OperationCancelled):
        second.result()
    hold.open()
    assert first.result().value == 1
    with pytest.raises(DirtyGradientsError, match="optim_step refused") as caught:
        step.result()
    assert isinstance(caught.value.__cause__, OperationCancelled)
    rl.training.zero_grad().result()
    rl.training.forward_backward(batch, LOSS)
    assert rl.training.optim_step(AdamW(lr=0.1)).result().version == 1


def test_cancelling_a_running_training_operation_comes_too_late(
    rl: Session, double: Double, batch: Batch
) -> None:
    hold = double.hold("forward_backward")
    operation = rl.training.forward_backward(batch, LOSS)
    assert hold.reached.wait(60)
    operation.cancel()
    rl.info().result()  # the cancel was sent before it
    hold.open()
    assert operation.result().value == 1
    assert rl.training.optim_step(AdamW(lr=0.1)).result().version == 1


def test_a_running_generate_that_is_cancelled_ends(rl: Session, double: Double) -> None:
    double.sample_holds = {0: Hold(), 1: Hold()}
    operation = rl.sampling.generate([[1]], PARAMS)
    assert double.sample_holds[0].reached.wait(60)
    operation.cancel()
    with pytest.raises(OperationCancelled, match="generate was cancelled while it ran"):
        operation.result(60)


def test_cancelling_what_has_ended_changes_nothing(rl: Session, batch: Batch) -> None:
    operation = rl.training.forward_backward(batch, LOSS)
    assert operation.result().value == 1
    operation.cancel()
    operation.cancel()
    assert operation.result().value == 1
    assert rl.training.optim_step(AdamW(lr=0.1)).result().version == 1


def test_a_cancel_that_overtakes_its_operation_leaves_no_gap(
    rl: Session, double: Double, doorkeeper: Doorkeeper
) -> None:
    """The second is cancelled, heard and acknowledged before the first has even arrived."""
    submits = doorkeeper.keep(
        lambda message: isinstance(message, Submit) and message.operation == "snapshot"
    )
    first, second = rl.training.snapshot("one"), rl.training.snapshot("two")
    second.cancel()
    with pytest.raises(OperationCancelled):
        second.result(60)
    rl.info().result()  # carries the acknowledgement
    submits.open()
    first.result(60)
    rl.training.snapshot("three").result(60)
    assert double.log == [("snapshot", "one"), ("snapshot", "three")]


def test_a_thousand_cancels_leave_no_gap(rl: Session, double: Double, batch: Batch) -> None:
    hold = double.hold("forward")
    rl.training.forward(batch)
    operations = [rl.training.snapshot(f"s{number}") for number in range(1000)]
    for operation in operations:
        operation.cancel()
    last = rl.training.snapshot("last")
    hold.open()
    last.result(60)
    cancelled = 0
    for operation in operations:
        try:
            operation.result()
        except OperationCancelled:
            cancelled += 1
    assert cancelled == 1000 - (double.names().count("snapshot") - 1)
    assert cancelled > 0


# -- deadlines ----------------------------------------------------------------------------------


#: how often time is moved, which stays far within a lease, and looks at an operation in between
MOVES, LOOKS = 100, 100


class Clock:
    """Goes to `time`, where the test sets it: half a second at each look of the watch, since the
    dispatcher takes a longer step for time in which it did not run."""

    def __init__(self) -> None:
        self.time = self._now = 0.0

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0.001)
        self._now = min(self.time, self._now + 0.5)

    def pass_until_done(self, rl: Session, operation: Operation[Any], deadline: float) -> None:
        """Lets as much time pass as the operation has, again and again until it has ended: it, or
        a part of it, may reach the server only when some has passed already."""
        for _ in range(MOVES):
            self.time += deadline + 0.1
            for _ in range(LOOKS):
                if operation.done():
                    return
                rl.info().result()
        raise AssertionError("no deadline acts on it")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timed(double: Double, clock: Clock, servers: ServerFactory) -> Iterator[Session]:
    """A session on a server whose clock stands still."""
    server: Server = servers(double, clock=clock, lease_seconds=1000.0)
    session = connect(server.url)
    yield session
    session.detach()


TIMED: dict[str, Callable[[Session, Batch, float], Operation[Any]]] = {
    "forward": lambda rl, batch, seconds: rl.training.forward(batch, deadline=seconds),
    "forward_backward": lambda rl, batch, seconds: rl.training.forward_backward(
        batch, LOSS, deadline=seconds
    ),
    "optim_step": lambda rl, batch, seconds: rl.training.optim_step(
        AdamW(lr=0.1), deadline=seconds
    ),
    "zero_grad": lambda rl, batch, seconds: rl.training.zero_grad(deadline=seconds),
    "snapshot": lambda rl, batch, seconds: rl.training.snapshot("a", deadline=seconds),
    "restore_snapshot": lambda rl, batch, seconds: rl.training.restore_snapshot(
        "a", deadline=seconds
    ),
    "drop_snapshot": lambda rl, batch, seconds: rl.training.drop_snapshot("a", deadline=seconds),
    "set_reference": lambda rl, batch, seconds: rl.training.set_reference(
        "current", deadline=seconds
    ),
    "save": lambda rl, batch, seconds: rl.training.save("a", deadline=seconds),
    "load": lambda rl, batch, seconds: rl.training.load("a", deadline=seconds),
    "checkpoints": lambda rl, batch, seconds: rl.training.checkpoints(deadline=seconds),
    "delete": lambda rl, batch, seconds: rl.training.delete("a", deadline=seconds),
    "export": lambda rl, batch, seconds: rl.training.export("a", deadline=seconds),
    "sync": lambda rl, batch, seconds: rl.weights.sync(deadline=seconds),
    "push": lambda rl, batch, seconds: rl.weights.push(
        {"w": batch.advantages.values},  # type: ignore[union-attr]
        deadline=seconds,
    ),
}


@pytest.mark.parametrize("name", TIMED)
def test_a_deadline_acts_on_every_operation_before_it_starts(
    name: str, timed: Session, double: Double, batch: Batch, clock: Clock
) -> None:
    hold = double.hold("forward")
    running = timed.training.forward(batch)
    assert hold.reached.wait(60)
    late = TIMED[name](timed, batch, 5.0)
    assert not late.done()
    clock.pass_until_done(timed, late, 5.0)
    with pytest.raises(DeadlineExceededError, match=f"deadline of {name} passed before it started"):
        late.result(60)
    hold.open()
    assert len(running.result().logprobs) == 3
    timed.weights.version().result()
    assert double.names() == ["forward"]


def test_a_deadline_never_ends_a_running_training_operation(
    timed: Session, double: Double, batch: Batch, clock: Clock
) -> None:
    hold = double.hold("forward_backward")
    operation = timed.training.forward_backward(batch, LOSS, deadline=5.0)
    assert hold.reached.wait(60)
    queued = timed.training.snapshot("a", deadline=6.0)
    clock.pass_until_done(timed, queued, 6.0)
    with pytest.raises(DeadlineExceededError):
        queued.result(60)  # so the watch has looked at both
    assert not operation.done()
    hold.open()
    assert operation.result().value == 1


def test_a_deadline_ends_a_running_generate(timed: Session, double: Double, clock: Clock) -> None:
    double.sample_holds = {1: Hold()}
    operation = timed.sampling.generate([[1]], PARAMS, deadline=5.0)
    assert double.sample_holds[1].reached.wait(60)
    clock.time = 5.1
    with pytest.raises(DeadlineExceededError, match="generate passed while it ran"):
        operation.result(60)


def test_without_a_deadline_nothing_ends(timed: Session, double: Double, clock: Clock) -> None:
    """A healthy generation may last: only silence of `stall_timeout` (300 s) ends it."""
    double.sample_holds = {1: Hold()}
    endless = timed.sampling.generate([[1]], PARAMS)
    assert double.sample_holds[1].reached.wait(60)
    other = timed.sampling.generate([[1]], PARAMS, deadline=250.0)
    for _ in range(2000):
        if double.names().count("generate") == 2:
            break
        timed.info().result()
    clock.time = 290.0
    with pytest.raises(DeadlineExceededError):
        other.result(60)
    assert not endless.done()
    double.sample_holds[1].open()
    assert len(endless.result()[0]) == 2
