"""A failure that nobody waits for: it surfaces at the next result, or when the session closes.

(PT012: where the exit of a session raises, its whole life is inside `raises`.)
"""

from __future__ import annotations

import asyncio

import pytest
from client_double import Double, ended

from remote_rl import AdamW, Batch, SamplingParams, Session, connect, losses
from remote_rl.errors import BackendError, ConflictError, DirtyGradientsError

LOSS = losses.CrossEntropy()


def drop_a_failure(rl: Session, double: Double, batch: Batch) -> None:
    """A forward that fails, its Operation gone."""
    double.faults["forward", 1] = BackendError("dropped")
    ended(rl.training.forward(batch))


def test_it_surfaces_at_the_next_result(rl: Session, double: Double, batch: Batch) -> None:
    drop_a_failure(rl, double, batch)
    version = rl.weights.version()
    with pytest.raises(BackendError, match="dropped") as caught:
        version.result()
    assert caught.value.__notes__ == ["raised by forward, whose result was not awaited"]
    assert version.result().trainer == 0  # once, and the asker's own result is not lost
    rl.close()


def test_it_surfaces_at_the_next_await(rl: Session, double: Double, batch: Batch) -> None:
    drop_a_failure(rl, double, batch)

    async def main() -> int:
        with pytest.raises(BackendError, match="dropped"):
            await rl.weights.version()
        return (await rl.weights.version()).trainer

    assert asyncio.run(main()) == 0


def test_one_that_is_still_held_waits_to_be_asked(
    rl: Session, double: Double, batch: Batch
) -> None:
    double.faults["forward", 1] = BackendError("held")
    operation = rl.training.forward(batch)
    ended(operation)
    assert rl.weights.version().result().trainer == 0
    with pytest.raises(BackendError, match="held"):
        operation.result()
    rl.close()  # it was looked at


def test_held_to_the_end_it_surfaces_at_close(rl: Session, double: Double, batch: Batch) -> None:
    double.faults["forward", 1] = BackendError("held")
    operation = rl.training.forward(batch)
    with pytest.raises(BackendError, match="held"):
        rl.close()
    assert operation.done()
    rl.close()  # a second close does nothing


def test_the_askers_own_failure_comes_first(rl: Session, double: Double, batch: Batch) -> None:
    drop_a_failure(rl, double, batch)
    with pytest.raises(ConflictError, match="nothing was accumulated"):
        rl.training.optim_step(AdamW(lr=0.1)).result()
    with pytest.raises(BackendError, match="dropped"):
        rl.close()


def test_a_pipelines_cause_is_not_raised_twice(rl: Session, double: Double, batch: Batch) -> None:
    """The optim_step's DirtyGradientsError holds the dropped failure as its cause."""
    double.faults["forward_backward", 1] = BackendError("first")
    rl.training.forward_backward(batch, LOSS)
    with pytest.raises(DirtyGradientsError) as caught:
        rl.training.optim_step(AdamW(lr=0.1)).result()
    assert str(caught.value.__cause__) == "first"
    rl.training.zero_grad().result()
    rl.close()


def test_a_clean_exit_waits_for_everything(double: Double, rl: Session, batch: Batch) -> None:
    hold = double.hold("forward_backward")
    with rl:
        for _ in range(20):
            rl.training.forward_backward(batch, LOSS)
        last = rl.training.optim_step(AdamW(lr=0.1))
        generate = rl.sampling.generate([[1]], SamplingParams(max_tokens=2))
        hold.open()
    assert double.names().count("forward_backward") == 20
    assert last.done()
    assert last.result().version == 1
    assert len(generate.result()) == 1


def test_a_clean_exit_raises_a_failure_nobody_saw(
    double: Double, rl: Session, batch: Batch
) -> None:
    double.faults["forward_backward", 2] = BackendError("unseen")
    with pytest.raises(BackendError, match="unseen"), rl:  # noqa: PT012
        for _ in range(3):
            rl.training.forward_backward(batch, LOSS)
    with pytest.raises(Exception, match="closed"):
        rl.info()


def test_the_first_of_several_is_raised(double: Double, rl: Session, batch: Batch) -> None:
    double.faults["forward_backward", 1] = BackendError("one")
    double.faults["sync", 1] = BackendError("two")
    with pytest.raises(BackendError, match="one"), rl:  # noqa: PT012
        rl.training.forward_backward(batch, LOSS)
        rl.training.optim_step(AdamW(lr=0.1))
        rl.weights.sync()


def test_what_the_caller_cancelled_is_no_failure(rl: Session, double: Double) -> None:
    hold = double.hold("generate")
    operation = rl.sampling.generate([[1]], SamplingParams(max_tokens=2))
    assert hold.reached.wait(60)
    operation.cancel()
    del operation
    hold.open()
    rl.close()  # raises nothing


@pytest.mark.parametrize("exception", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_exception_cancels_what_has_not_started(
    exception: type[BaseException], double: Double, rl: Session, batch: Batch
) -> None:
    hold = double.hold("forward_backward")
    operations = []
    with pytest.raises(exception, match="the user's own") as caught, rl:  # noqa: PT012
        operations += [rl.training.forward_backward(batch, LOSS) for _ in range(5)]
        assert hold.reached.wait(60)
        raise exception("the user's own")
    hold.open()
    assert not getattr(caught.value, "__notes__", [])  # cancelling is no failure
    assert all(operation.done() for operation in operations)
    begun = ["forward_backward"]  # the one that ran
    if rl._url is not None:  # a server's run goes on: its next driver comes after all of it
        connect(rl._url, start="current").close()
        begun.append("zero_grad")
    assert double.names() == begun


def test_an_earlier_failure_is_a_note_on_the_users_exception(
    double: Double, rl: Session, batch: Batch
) -> None:
    with pytest.raises(RuntimeError, match="the user's own") as caught, rl:  # noqa: PT012
        drop_a_failure(rl, double, batch)
        raise RuntimeError("the user's own")
    (note,) = caught.value.__notes__
    assert note == "an operation that was not awaited failed earlier: dropped"


def test_a_failure_that_is_the_users_exception_is_not_noted(
    double: Double, rl: Session, batch: Batch
) -> None:
    double.faults["forward", 1] = BackendError("seen")
    with pytest.raises(BackendError, match="seen") as caught, rl:
        rl.training.forward(batch).result()
    assert not getattr(caught.value, "__notes__", [])


def test_a_failure_of_the_closing_itself_is_a_note(batch: Batch) -> None:
    class FailsToClose(Double):
        async def close(self) -> None:
            raise OSError("the engine would not stop")

    with pytest.raises(RuntimeError, match="the user's own") as caught, connect(FailsToClose()):
        raise RuntimeError("the user's own")
    (note,) = caught.value.__notes__
    assert "the engine would not stop" in note
    with pytest.raises(OSError, match="the engine would not stop"), connect(FailsToClose()):
        pass  # with a clean exit nothing else is there to carry it
