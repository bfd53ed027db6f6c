"""Pipelines: submission never blocks, order is that of the calls, and a failure in the middle
stops what depends on it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from client_double import Double
from client_support import ServerFactory, SessionFactory

from remote_rl import AdamW, Batch, Operation, SamplingParams, Session, connect, losses
from remote_rl.errors import (
    BackendError,
    ConflictError,
    DirtyGradientsError,
    InvalidRequestError,
)
from remote_rl.messages import Message

LOSS = losses.CrossEntropy()
STEP = AdamW(lr=0.1)


def test_a_thousand_operations_are_submitted_while_the_backend_stands_still(
    rl: Session, double: Double, batch: Batch
) -> None:
    hold = double.hold("forward_backward")
    operations: list[Operation[Any]] = []

    def submit() -> None:
        for number in range(999):
            loss = losses.CrossEntropy(scale=float(number))
            operations.append(rl.training.forward_backward(batch, loss))
        operations.append(rl.training.optim_step(STEP))

    submitting = threading.Thread(target=submit)
    submitting.start()
    submitting.join(120)  # ends though nothing was executed, or the test fails here
    blocked = submitting.is_alive()
    assert hold.reached.wait(60)
    executed = list(double.log)
    assert not any(operation.done() for operation in operations)
    hold.open()
    submitting.join()
    assert not blocked
    assert executed == [("forward_backward", 0.0)]  # the first one, which stands still
    assert operations[-1].result(120).version == 1
    assert [operation.result().value for operation in operations[:-1]] == list(range(999))
    assert [tag for _, tag in double.log] == [*range(999), 0.1]


def test_training_and_syncs_execute_in_the_order_of_the_calls(
    rl: Session, double: Double, batch: Batch
) -> None:
    hold = double.hold("forward")
    rl.training.forward(batch)
    for step in range(3):
        rl.training.forward_backward(batch, losses.CrossEntropy(scale=float(step)))
        rl.training.optim_step(AdamW(lr=float(step)))
        rl.weights.sync(label=step)
    version = rl.weights.version()
    hold.open()
    assert (version.result().trainer, version.result().sampler) == (3, 3)
    expected: list[tuple[str, Any]] = [("forward", "current")]
    for step in range(3):
        expected += [("forward_backward", step), ("optim_step", step), ("sync", step)]
    assert double.log == expected


def test_generates_do_not_wait_for_training(rl: Session, double: Double, batch: Batch) -> None:
    hold = double.hold("forward_backward")
    training = rl.training.forward_backward(batch, LOSS)
    groups = rl.sampling.generate([[1]], SamplingParams(max_tokens=2)).result(60)
    assert len(groups) == 1
    assert not training.done()
    hold.open()
    training.result()


DEPENDENT: dict[str, Callable[[Session, Batch], Operation[Any]]] = {
    "forward_backward": lambda rl, batch: rl.training.forward_backward(batch, LOSS),
    "optim_step": lambda rl, batch: rl.training.optim_step(STEP),
    "save": lambda rl, batch: rl.training.save("a"),
    "sync": lambda rl, batch: rl.weights.sync(),
}


@pytest.mark.parametrize("dependent", DEPENDENT)
def test_after_a_failed_forward_backward(
    dependent: str,
    session_factory: SessionFactory,
    double: Double,
    batch: Batch,
    tmp_path: Path,
) -> None:
    rl = session_factory(double, checkpoint_dir=tmp_path)
    double.faults["forward_backward", 2] = BackendError("the second one", worker=3)
    hold = double.hold("forward_backward")
    pipeline = [rl.training.forward_backward(batch, LOSS) for _ in range(2)]
    later = DEPENDENT[dependent](rl, batch)
    hold.open()
    with pytest.raises(DirtyGradientsError, match=f"{dependent} refused") as caught:
        later.result()
    cause = caught.value.__cause__
    assert type(cause) is BackendError
    assert (cause.message, cause.details) == ("the second one", {"worker": 3})
    assert pipeline[0].result().value == 1
    with pytest.raises(BackendError, match="the second one"):
        pipeline[1].result()
    executed = ["forward_backward", "forward_backward"]
    assert double.names() == executed  # the dependent one never reached the backend
    assert len(rl.training.forward(batch).result().logprobs) == 3  # what depends on nothing works
    rl.training.zero_grad().result()
    rl.training.forward_backward(batch, LOSS).result()
    assert rl.training.optim_step(STEP).result().version == 1
    assert rl.training.save("b").result().version == 1
    assert rl.weights.sync().result().version == 1


def test_every_later_one_names_the_first_failure(rl: Session, double: Double, batch: Batch) -> None:
    double.faults["forward_backward", 1] = BackendError("first")
    double.faults["optim_step", 1] = BackendError("never reached")
    operations = [
        rl.training.forward_backward(batch, LOSS),
        rl.training.optim_step(STEP),
        rl.training.forward_backward(batch, LOSS),
        rl.weights.sync(),
    ]
    for operation in operations[1:]:
        with pytest.raises(DirtyGradientsError) as caught:
            operation.result()
        assert str(caught.value.__cause__) == "first"
    with pytest.raises(BackendError, match="first"):
        operations[0].result()


def test_zero_grad_inside_the_pipeline(rl: Session, double: Double, batch: Batch) -> None:
    """Everything is submitted before the failure is known, and what follows zero_grad works."""
    double.faults["forward_backward", 1] = BackendError("first")
    hold = double.hold("forward_backward")
    failed = rl.training.forward_backward(batch, LOSS)
    rl.training.zero_grad()
    rl.training.forward_backward(batch, LOSS)
    step = rl.training.optim_step(STEP)
    hold.open()
    assert step.result().version == 1
    with pytest.raises(BackendError, match="first"):
        failed.result()


def test_after_a_failed_optim_step_nobody_knows_the_weights(
    rl: Session, double: Double, batch: Batch
) -> None:
    """Whether it has changed them can't be told, so they are not used under their old number."""
    double.faults["optim_step", 1] = BackendError("half a step")
    rl.training.forward_backward(batch, LOSS).result()
    with pytest.raises(BackendError, match="half a step"):
        rl.training.optim_step(STEP).result()
    rl.training.zero_grad().result()
    for later in (
        rl.training.forward_backward(batch, LOSS),
        rl.training.forward(batch),
        rl.weights.sync(),
    ):
        with pytest.raises(ConflictError, match="load, restore_snapshot or reset") as caught:
            later.result()
        assert str(caught.value.__cause__) == "half a step"


def test_a_failed_forward_or_sync_dirties_nothing(
    rl: Session, double: Double, batch: Batch
) -> None:
    double.faults["forward", 1] = BackendError("no forward")
    double.faults["sync", 1] = BackendError("no sync")
    for failing in (rl.training.forward(batch), rl.weights.sync()):
        with pytest.raises(BackendError):
            failing.result()
    rl.training.forward_backward(batch, LOSS)
    assert rl.training.optim_step(STEP).result().version == 1


def test_optim_step_of_nothing_is_refused(rl: Session, double: Double) -> None:
    with pytest.raises(ConflictError, match="nothing was accumulated"):
        rl.training.optim_step(STEP).result()
    assert double.log == []


def test_what_the_client_refuses_takes_no_number_and_dirties_nothing(
    rl: Session, batch: Batch, messages: list[Message]
) -> None:
    bare = batch.replace(advantages=None)
    with pytest.raises(ValueError, match=r"PPO needs Batch\.advantages"):
        rl.training.forward_backward(bare, losses.PPO())
    with pytest.raises(ValueError, match="10 ids"):
        rl.training.forward_backward(batch.replace(responses=[[1, 2, 10], [4], [5, 6]]), LOSS)
    with pytest.raises(ValueError, match=r"Save\.name can't be 'base'"):
        rl.training.save("base")
    assert messages == []
    first = rl.training.forward_backward(batch, LOSS)
    assert repr(first).startswith("Operation(forward_backward 1,")
    assert rl.training.optim_step(STEP).result().version == 1


@pytest.mark.parametrize("deadline", [0, -1.0, float("nan"), float("inf"), "soon", True])
def test_a_deadline_that_is_none_is_refused_at_the_call(
    rl: Session, batch: Batch, messages: list[Message], deadline: Any
) -> None:
    calls: list[Callable[[], object]] = [
        lambda: rl.training.forward_backward(batch, LOSS, deadline=deadline),
        lambda: rl.training.forward_backward(
            batch, losses.custom(_never, framework=None), deadline=deadline
        ),
        lambda: rl.weights.sync(deadline=deadline),
        lambda: rl.sampling.generate([[1]], SamplingParams(max_tokens=1), deadline=deadline),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="deadline must be a finite number > 0"):
            call()
    assert messages == []
    assert rl.training.forward_backward(batch, LOSS).result().value == 1  # nothing is dirty


def test_a_request_that_can_not_cross_takes_no_number(
    double: Double, servers: ServerFactory, batch: Batch
) -> None:
    """A user's own subclass: refused at the call, and nothing after it waits for its number."""

    class MyBatch(Batch):
        pass

    class MyParams(SamplingParams):
        pass

    mine = MyBatch(**{field.name: getattr(batch, field.name) for field in attrs.fields(Batch)})
    with connect(servers(double).url) as rl:
        with pytest.raises(ValueError, match="MyBatch can't cross the wire"):
            rl.training.forward_backward(mine, LOSS)
        with pytest.raises(ValueError, match="MyParams can't cross the wire"):
            rl.sampling.generate([[1]], MyParams(max_tokens=1))
        assert rl.training.forward_backward(batch, LOSS).result(60).value == 1
    # and closing waited for nothing


def _never(batch: Batch, outputs: object) -> Any:
    raise AssertionError("the function was called")


@pytest.mark.parametrize("written", [12, -1])
def test_a_token_written_into_a_batch_after_it_was_made_never_reaches_the_backend(
    mocked: Session, mock: Any, batch: Batch, written: int
) -> None:
    mocked.training.forward_backward(batch, LOSS).result()
    batch.responses.values[1] = written  # the mock has the ids 0 to 11
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match=f"{written}"):
            mocked.training.forward_backward(batch, LOSS).result()
        mocked.training.zero_grad().result()  # as after any loss that did not come in
    batch.responses.values[1] = 2
    mocked.training.forward_backward(batch, LOSS).result()
    seen = [(call.operation, call.event) for call in mock.calls]
    assert seen.count(("forward_backward", "started")) == 2
