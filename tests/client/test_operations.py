"""An operation from plain scripts and threads: results, timeouts, progress, repr."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from client_double import Double

from remote_rl import AdamW, Batch, SamplingParams, Session, losses
from remote_rl.errors import BackendError

LOSS = losses.CrossEntropy()


def test_result_of_each_face(rl: Session, batch: Batch) -> None:
    assert rl.training.forward_backward(batch, losses.CrossEntropy(scale=3.0)).result().value == 3
    assert rl.training.optim_step(AdamW(lr=0.1)).result().version == 1
    assert rl.weights.sync(label="one").result().label == "one"
    groups = rl.sampling.generate([[1], [2, 3]], SamplingParams(n=2, max_tokens=2)).result()
    assert [list(group.prompt) for group in groups] == [[1], [2, 3]]
    assert [[(s.prompt_index, s.index) for s in group] for group in groups] == [
        [(0, 0), (0, 1)],
        [(1, 0), (1, 1)],
    ]
    assert rl.info().result().backend == "double"


def test_a_result_may_be_asked_for_again(rl: Session, double: Double, batch: Batch) -> None:
    double.faults["forward_backward", 1] = BackendError("no")
    operation = rl.training.forward_backward(batch, LOSS)
    seen = []
    for _ in range(2):
        with pytest.raises(BackendError, match="no") as caught:
            operation.result()
        seen.append(caught.value)
    assert seen[0] is not seen[1]  # a traceback of its own for each place
    assert double.names() == ["forward_backward"]


def test_a_backends_own_exception_is_a_backend_error_with_its_traceback(
    rl: Session, double: Double, batch: Batch
) -> None:
    double.faults["forward_backward", 1] = KeyError("missing")
    with pytest.raises(BackendError, match=r"KeyError.*missing") as caught:
        rl.training.forward_backward(batch, LOSS).result()
    assert "client_double.py" in caught.value.details["traceback"]


def test_a_timeout_cancels_nothing(rl: Session, double: Double, batch: Batch) -> None:
    hold = double.hold("forward_backward")
    operation = rl.training.forward_backward(batch, LOSS)
    with pytest.raises(TimeoutError, match=r"forward_backward has not ended after 0\.01 s"):
        operation.result(timeout=0.01)
    with pytest.raises(TimeoutError):
        operation.result(timeout=0)
    assert not operation.done()
    hold.open()
    assert operation.result(timeout=30).value == 1
    assert double.names() == ["forward_backward"]


def test_done_progress_and_repr(rl: Session, double: Double, batch: Batch) -> None:
    hold = double.hold("forward_backward")
    operation = rl.training.forward_backward(batch, LOSS)
    assert repr(operation) == "Operation(forward_backward 1, pending)"
    assert hold.reached.wait(30)
    hold.open()
    operation.result()
    assert operation.done()
    assert repr(operation) == "Operation(forward_backward 1, done)"
    double.faults["forward_backward", 2] = BackendError("no")
    failed = rl.training.forward_backward(batch, LOSS)
    with pytest.raises(BackendError):
        failed.result()
    assert repr(failed) == "Operation(forward_backward 2, failed)"


def test_progress_of_a_running_operation(rl: Session, double: Double, batch: Batch) -> None:
    hold = double.hold("forward_backward")
    operation = rl.training.forward_backward(batch, LOSS)
    for _ in range(600):
        if operation.progress is not None:
            break
        with pytest.raises(TimeoutError):
            operation.result(timeout=0.05)
    assert operation.progress is not None
    assert (operation.progress.done, operation.progress.total) == (1, 2)
    assert operation.progress.what == "computing"
    hold.open()
    operation.result()


def test_one_operation_waited_for_by_many_threads(
    rl: Session, double: Double, batch: Batch
) -> None:
    hold = double.hold("forward_backward")
    operation = rl.training.forward_backward(batch, LOSS)
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(operation.result) for _ in range(8)]
        hold.open()
        assert [each.result(30).value for each in waiting] == [1] * 8


def test_order_across_threads_is_the_order_of_the_calls(
    rl: Session, double: Double, batch: Batch
) -> None:
    """Calls from eight threads under one lock: the backend sees them as the lock did."""
    lock = threading.Lock()
    called: list[float] = []

    def work(thread: int) -> None:
        for step in range(10):
            with lock:
                scale = float(thread * 100 + step)
                called.append(scale)
                rl.training.forward_backward(batch, losses.CrossEntropy(scale=scale))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    rl.weights.version().result()
    assert [tag for name, tag in double.log if name == "forward_backward"] == called
    assert len(called) == 80


def test_calls_without_a_lock_get_each_number_once(
    rl: Session, double: Double, batch: Batch
) -> None:
    with ThreadPoolExecutor(8) as pool:
        operations = list(pool.map(lambda _: rl.training.forward_backward(batch, LOSS), range(40)))
    numbers = [operation._call.number for operation in operations]
    assert sorted(numbers) == list(range(1, 41))
    for operation in operations:
        operation.result()
    assert len(double.log) == 40
