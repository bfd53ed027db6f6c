"""Losses that run in the client: their place in the order, their failures, reuse of outputs."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from client_double import Double, ended
from client_support import SessionFactory, learn, logprobs, small_mock

from remote_rl import AdamW, Batch, Outputs, Session, losses
from remote_rl.errors import (
    BackendError,
    ConflictError,
    DeadlineExceededError,
    DirtyGradientsError,
    InvalidRequestError,
    OperationCancelled,
    UnsupportedError,
)

STEP = AdamW(lr=0.1)


def cross_entropy(batch: Batch, outputs: dict[str, Any]) -> Any:
    """-mean logprob, by hand."""
    count = len(outputs["logprobs"])
    slope = np.full(count, -1 / count, np.float32)
    return -outputs["logprobs"].mean(), {"logprobs": slope}, {"mine": 7}


def by_hand(function: Any = cross_entropy, **options: Any) -> losses.Loss:
    return losses.custom(function, framework=None, **options)


def test_it_trains_like_the_loss_of_the_same_formula(
    session_factory: SessionFactory, batch: Batch
) -> None:
    trained = []
    for loss in (by_hand(), losses.CrossEntropy()):
        rl = session_factory(small_mock())
        result = rl.training.forward_backward(batch, loss)
        step = rl.training.optim_step(STEP)
        trained.append((result.result().value, step.result().grad_norm, *logprobs(rl, batch)))
    np.testing.assert_allclose(trained[0], trained[1], rtol=1e-5)


def test_value_and_metrics_are_the_functions_own(mocked: Session, batch: Batch) -> None:
    result = mocked.training.forward_backward(batch, by_hand()).result()
    assert result.value == pytest.approx(-np.mean(logprobs(mocked, batch)), rel=1e-6)
    assert result.metrics["mine"] == 7
    assert result.metrics["custom/forwards"] == 1
    assert result.version == 0


def test_its_two_numbers_come_before_whatever_is_called_next(
    rl: Session, double: Double, batch: Batch
) -> None:
    began, go_on = threading.Event(), threading.Event()

    def slow(given: Batch, outputs: dict[str, Any]) -> Any:
        began.set()
        assert go_on.wait(60)
        return cross_entropy(given, outputs)

    operation = rl.training.forward_backward(batch, by_hand(slow))
    step = rl.training.optim_step(STEP)
    sync = rl.weights.sync(label="after")
    assert began.wait(60)
    rl.info().result()
    assert double.names() == ["forward"]  # the rest waits for the function
    assert not step.done()
    go_on.set()
    assert sync.result(60).version == 1
    assert operation.done()
    assert double.names() == ["forward", "forward_backward", "optim_step", "sync"]


def test_several_run_one_after_the_other_in_the_order_of_the_calls(
    rl: Session, double: Double, batch: Batch
) -> None:
    ran: list[int] = []

    def numbered(number: int) -> Any:
        def function(given: Batch, outputs: dict[str, Any]) -> Any:
            ran.append(number)
            return 0.0, {"logprobs": np.full(6, number, np.float32)}

        return by_hand(function)

    held = rl.training.forward(batch).result()
    threads = threading.active_count()
    operations = [
        rl.training.forward_backward(batch, numbered(number), outputs=held) for number in range(300)
    ]
    assert threading.active_count() <= threads + 1
    operations[-1].result(60)
    sent = [request.loss.values["logprobs"].values[0] for request in double.requests[1:]]
    assert ran == sent == list(range(300))


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_exception_that_cannot_say_its_message_holds_nothing_up(
    rl: Session, batch: Batch
) -> None:
    def wrong(given: Batch, outputs: dict[str, Any]) -> Any:
        raise Mute

    operation = rl.training.forward_backward(batch, by_hand(wrong))
    with pytest.raises(Mute):
        operation.result(60)
    with pytest.raises(DirtyGradientsError, match="its message can't be read"):
        rl.training.optim_step(STEP).result(60)
    rl.training.zero_grad().result(60)


def test_outputs_that_are_held_cost_no_forward(rl: Session, double: Double, batch: Batch) -> None:
    held = rl.training.forward(batch).result()
    result = rl.training.forward_backward(batch, by_hand(), outputs=held).result()
    assert double.names() == ["forward", "forward_backward"]
    assert result.metrics["custom/forwards"] == 0


def test_outputs_of_another_version_are_a_conflict(mocked: Session, batch: Batch) -> None:
    held = mocked.training.forward(batch).result()
    learn(mocked, batch)
    with pytest.raises(ConflictError, match=r"taken at version 0.*at version 1"):
        mocked.training.forward_backward(batch, by_hand(), outputs=held).result()


@pytest.mark.parametrize("problem", ["name", "rows"])
def test_outputs_that_do_not_fit_are_refused_at_the_call(
    problem: str, rl: Session, double: Double, batch: Batch
) -> None:
    held = rl.training.forward(batch).result()
    if problem == "name":
        held = Outputs(values={"entropy": held.logprobs}, version=0)
    else:
        held = Outputs(values={"logprobs": held.logprobs[:2]}, version=0)
    with pytest.raises(InvalidRequestError, match="logprobs"):
        rl.training.forward_backward(batch, by_hand(), outputs=held)
    rl.training.forward_backward(batch, losses.CrossEntropy())  # nothing is dirty
    assert rl.training.optim_step(STEP).result().version == 1


def test_outputs_are_for_custom_losses_only(rl: Session, batch: Batch) -> None:
    held = rl.training.forward(batch).result()
    with pytest.raises(InvalidRequestError, match="outputs= is only for losses"):
        rl.training.forward_backward(batch, losses.CrossEntropy(), outputs=held)


def test_a_function_that_raises(rl: Session, double: Double, batch: Batch) -> None:
    mistake = LookupError("my own")

    def wrong(given: Batch, outputs: dict[str, Any]) -> Any:
        raise mistake

    operation = rl.training.forward_backward(batch, by_hand(wrong))
    step = rl.training.optim_step(STEP)
    with pytest.raises(LookupError, match="my own") as caught:
        operation.result()
    assert caught.value is mistake
    with pytest.raises(DirtyGradientsError, match="optim_step refused") as dirty:
        step.result()
    assert "LookupError: my own" in str(dirty.value.__cause__)
    assert double.names() == ["forward"]
    rl.training.zero_grad().result()
    rl.training.forward_backward(batch, by_hand()).result()
    assert rl.training.optim_step(STEP).result().version == 1


def test_a_function_that_raises_and_nobody_looks(rl: Session, batch: Batch) -> None:
    def wrong(given: Batch, outputs: dict[str, Any]) -> Any:
        raise LookupError("my own")

    with pytest.raises(LookupError, match="my own"), rl:
        rl.training.forward_backward(batch, by_hand(wrong))


def test_a_forward_that_fails(rl: Session, double: Double, batch: Batch) -> None:
    double.faults["forward", 1] = BackendError("no forward")
    operation = rl.training.forward_backward(batch, by_hand(_never))
    with pytest.raises(BackendError, match="no forward"):
        operation.result()
    with pytest.raises(DirtyGradientsError):
        rl.training.optim_step(STEP).result()


def test_another_operations_failure_does_not_become_its_own(
    rl: Session, double: Double, batch: Batch
) -> None:
    double.faults["sync", 1] = BackendError("no sync")
    ended(rl.weights.sync())  # failed, and nobody holds it
    operation = rl.training.forward_backward(batch, by_hand())
    ended(operation)
    with pytest.raises(BackendError, match="no sync"):
        operation.result()  # the place where the dropped failure surfaces
    assert operation.result().version == 0  # the loss itself went well
    assert rl.training.optim_step(STEP).result().version == 1


@pytest.mark.parametrize("returned", [None, float("nan")])
def test_a_function_that_returns_nonsense(rl: Session, batch: Batch, returned: Any) -> None:
    def nonsense(given: Batch, outputs: dict[str, Any]) -> Any:
        return returned if returned is None else (returned, {})

    with pytest.raises(InvalidRequestError, match="custom loss"):
        rl.training.forward_backward(batch, by_hand(nonsense)).result()
    with pytest.raises(DirtyGradientsError):
        rl.training.optim_step(STEP).result()


def test_cancelled_while_its_function_runs(rl: Session, double: Double, batch: Batch) -> None:
    began, go_on = threading.Event(), threading.Event()

    def slow(given: Batch, outputs: dict[str, Any]) -> Any:
        began.set()
        assert go_on.wait(60)
        return cross_entropy(given, outputs)

    operation = rl.training.forward_backward(batch, by_hand(slow))
    assert began.wait(60)
    operation.cancel()
    with pytest.raises(OperationCancelled):
        operation.result(60)
    go_on.set()
    with pytest.raises(DirtyGradientsError):
        rl.training.optim_step(STEP).result(60)
    rl.training.zero_grad().result(60)
    assert double.names() == ["forward", "zero_grad"]


def test_a_deadline_that_passes_in_its_function(rl: Session, double: Double, batch: Batch) -> None:
    ended_late = threading.Event()

    def slow(given: Batch, outputs: dict[str, Any]) -> Any:
        ended_late.wait(0.3)  # longer than the deadline
        return cross_entropy(given, outputs)

    operation = rl.training.forward_backward(batch, by_hand(slow), deadline=0.2)
    with pytest.raises(DeadlineExceededError, match="custom loss"):
        operation.result(60)
    assert double.names() == ["forward"]


def test_training_operations_inside_its_function_are_refused(
    rl: Session, double: Double, batch: Batch
) -> None:
    """They would come after the loss, which waits for the function: a deadlock, said at once."""
    refused: list[str] = []

    def inside(given: Batch, outputs: dict[str, Any]) -> Any:
        for name, call in {
            "forward": lambda: rl.training.forward(given, policy="reference"),
            "version": lambda: rl.weights.version(),
            "forward_backward": lambda: rl.training.forward_backward(given, by_hand()),
        }.items():
            with pytest.raises(InvalidRequestError, match=r"inside the function of losses\.custom"):
                call()
            refused.append(name)
        assert rl.info().result(60).backend == "double"  # which is ordered after nothing
        return cross_entropy(given, outputs)

    assert rl.training.forward_backward(batch, by_hand(inside)).result(60).version == 0
    assert refused == ["forward", "version", "forward_backward"]
    assert rl.training.optim_step(STEP).result().version == 1
    assert double.names() == ["forward", "forward_backward", "optim_step"]


def test_without_torch_a_torch_loss_is_refused_at_the_call(
    rl: Session, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"pip install 'remote-rl\[torch\]'"):
        rl.training.forward_backward(batch, losses.custom(_never))
    rl.training.forward_backward(batch, losses.CrossEntropy())  # nothing is dirty
    assert rl.training.optim_step(STEP).result().version == 1


def _never(batch: Batch, outputs: dict[str, Any]) -> Any:
    raise AssertionError("the function was called")
