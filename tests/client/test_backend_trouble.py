"""What a backend may do to a session, and what it may not: exits, deaths, threads, late ends."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from client_double import Double, ended
from client_support import ServerFactory, SessionFactory

from remote_rl import AdamW, Batch, SamplingParams, Session, connect, errors, losses
from remote_rl.types import Generation, Outputs

GENERATE = SamplingParams(max_tokens=2)


@pytest.mark.parametrize("leaves", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_an_exit_inside_an_operation_is_its_failure_and_nobody_elses(
    rl: Session, double: Double, batch: Batch, leaves: BaseException
) -> None:
    async def forward(request: Any, context: Any) -> Outputs:
        raise leaves

    double.forward = forward  # type: ignore[method-assign]
    with pytest.raises(errors.BackendError, match=type(leaves).__name__):
        rl.training.forward(batch).result(60)
    rl.training.snapshot("alive").result(60)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_end_of_the_loop_ends_every_call(double: Double, batch: Batch) -> None:
    rl = connect(double)
    hold = double.hold("forward")
    waiting = rl.training.forward(batch)
    assert hold.reached.wait(60)

    def leave() -> None:
        raise SystemExit(1)

    rl._loop.call(leave)
    with pytest.raises(errors.RunLostError, match="ended from within"):
        waiting.result(60)
    with pytest.raises(errors.RunLostError):
        rl.training.forward(batch)
    rl.detach()


def test_a_backend_can_say_that_the_run_is_lost(
    servers: ServerFactory, double: Double, batch: Batch
) -> None:
    url = servers(double).url
    double.faults["forward", 1] = errors.RunLostError("every rank is dead", last_checkpoint=None)
    first = connect(url)
    with pytest.raises(errors.RunLostError, match="every rank is dead"):
        first.training.forward(batch).result(60)
    with pytest.raises(errors.RunLostError, match="every rank is dead"):
        first.training.forward(batch).result(60)
    assert double.closed  # killed
    with pytest.raises(errors.RunLostError, match="every rank is dead"):
        connect(url, start="base")
    first.detach()


def test_signs_of_life_may_come_from_threads(double: Double, batch: Batch) -> None:
    """asyncio's debug mode raises where a loop is touched from elsewhere."""
    shown = threading.Event()

    async def forward(request: Any, context: Any) -> Outputs:
        asyncio.get_running_loop().set_debug(True)
        await context.thread(context.progress, 1, 2, "from a thread")
        await asyncio.to_thread(shown.wait, 60)
        asyncio.get_running_loop().set_debug(False)
        return Outputs(
            values={"logprobs": request.batch.responses.with_values([0.0] * 6)}, version=0
        )

    double.forward = forward  # type: ignore[method-assign]
    with connect(double) as rl:
        operation = rl.training.forward(batch)
        for _ in range(1000):
            if operation.progress is not None:
                break
            ended(rl.weights.version()) if operation.done() else ended(rl.info())
        assert operation.progress is not None
        assert operation.progress.what == "from a thread"
        shown.set()
        operation.result(60)


def test_generates_that_block_leave_training_a_thread(double: Double, batch: Batch) -> None:
    go_on = threading.Event()

    async def generate(request: Any, context: Any) -> Generation:
        await context.thread(go_on.wait, 60)
        raise errors.BackendError("over")

    async def forward(request: Any, context: Any) -> Outputs:
        zeros = await context.thread(lambda: request.batch.responses.with_values([0.0] * 6))
        return Outputs(values={"logprobs": zeros}, version=0)

    double.generate = generate  # type: ignore[method-assign]
    double.forward = forward  # type: ignore[method-assign]
    with connect(double) as rl:
        blocked = [rl.sampling.generate([[1]], GENERATE) for _ in range(50)]
        rl.training.forward(batch).result(60)
        go_on.set()
        for operation in blocked:
            with pytest.raises(errors.BackendError, match="over"):
                operation.result(60)


def test_a_close_that_hangs_is_ended_by_a_kill(double: Double) -> None:
    async def close() -> None:
        await asyncio.Event().wait()

    double.close = close  # type: ignore[method-assign]
    rl = connect(double, stall_timeout=0.2)
    rl.close()
    assert double.closed


def test_a_dropped_failure_does_not_cut_the_drain_short(
    rl: Session, double: Double, batch: Batch
) -> None:
    double.faults["sync", 1] = errors.BackendError("no sync")
    ended(rl.weights.sync())  # failed, and nobody holds it
    hold = double.hold("generate")
    running = rl.sampling.generate([[1]], GENERATE)
    assert hold.reached.wait(60)
    closing = threading.Thread(target=_closed, args=(rl, raised := []))
    closing.start()
    assert not running._call.ending.wait(1.5)  # a look at the pause lies within
    hold.open()
    closing.join(60)
    assert len(running.result()) == 1
    assert [str(error) for error in raised] == ["no sync"]


def _closed(rl: Session, raised: list[BaseException]) -> None:
    try:
        rl.close()
    except errors.BackendError as error:
        raised.append(error)


def test_an_abort_does_not_reach_what_is_called_after_it(
    session_factory: SessionFactory, double: Double
) -> None:
    rl = session_factory(double)
    hold = double.sample_holds[0] = double.hold("never used")
    before = rl.sampling.generate([[1]], GENERATE)
    abort = rl.sampling.abort()
    after = rl.sampling.generate([[1]], GENERATE)
    abort.result(60)
    assert before.result(60)[0][0].finish_reason == "abort"
    assert not after.done()
    hold.open()
    assert after.result(60)[0][0].finish_reason == "stop"


def test_a_pause_lasts_until_all_who_asked_for_it_are_gone(servers: ServerFactory) -> None:
    double = Double()
    driver = connect(servers(double).url)
    handle = driver.handle()
    first, second = connect(handle), connect(handle)
    first.sampling.pause().result(60)
    second.sampling.pause().result(60)
    second.close()
    assert driver.info().result(60).paused
    first.close()
    driver.sampling.abort().result(60)
    assert not driver.info().result(60).paused
    driver.close()


def test_control_is_not_queued_behind_generates(servers: ServerFactory) -> None:
    double = Double()
    with connect(servers(double).url) as rl:
        hold = double.hold("generate")
        waiting = [rl.sampling.generate([[1]], GENERATE) for _ in range(500)]
        rl.sampling.pause().result(60)
        assert sum(operation.done() for operation in waiting) == 0
        rl.sampling.resume().result(60)
        hold.open()
        for operation in waiting:
            operation.result(60)
    order = double.names()
    assert order.index("pause") < len(order) - 1


def test_a_failed_step_leaves_weights_that_must_be_replaced(
    mocked: Session, mock: Any, batch: Batch
) -> None:
    mocked.training.snapshot("before").result()
    mocked.training.forward_backward(batch, losses.PPO()).result()

    async def half_a_step(request: Any, context: Any) -> Any:
        raise OSError("one rank died in it")

    mock.training.optim_step = half_a_step
    with pytest.raises(errors.BackendError, match="one rank died"):
        mocked.training.optim_step(AdamW(lr=0.1)).result()
    del mock.training.optim_step
    mocked.training.zero_grad().result()
    for refused in (mocked.training.forward(batch), mocked.weights.sync()):
        with pytest.raises(errors.ConflictError, match="weights are unknown"):
            refused.result(60)
    mocked.training.restore_snapshot("before").result()
    mocked.training.forward(batch).result(60)
