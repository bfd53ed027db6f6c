"""The same operations inside event loops."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest
from client_double import Double, Hold
from client_support import SessionFactory

from remote_rl import AdamW, Batch, Sample, SamplingParams, Session, losses
from remote_rl.errors import BackendError

LOSS = losses.CrossEntropy()


def test_await(rl: Session, double: Double, batch: Batch) -> None:
    async def main() -> int:
        result = await rl.training.forward_backward(batch, LOSS)
        assert result.value == 1
        return (await rl.training.optim_step(AdamW(lr=0.1))).version

    assert asyncio.run(main()) == 1


def test_many_at_once_keep_the_order_of_the_calls(
    rl: Session, double: Double, batch: Batch
) -> None:
    async def main() -> list[float]:
        calls = [
            rl.training.forward_backward(batch, losses.CrossEntropy(scale=float(number)))
            for number in range(50)
        ]
        return [result.value for result in await asyncio.gather(*calls)]

    assert asyncio.run(main()) == list(range(50))
    assert [tag for _, tag in double.log] == list(range(50))


def test_the_callers_loop_runs_while_an_operation_does(
    rl: Session, double: Double, batch: Batch
) -> None:
    hold = double.hold("forward_backward")

    async def main() -> None:
        operation = rl.training.forward_backward(batch, LOSS)

        async def let_go() -> None:
            hold.open()

        await asyncio.gather(operation, let_go())

    asyncio.run(main())


def test_one_operation_awaited_from_several_loops(
    rl: Session, double: Double, batch: Batch
) -> None:
    hold = double.hold("forward_backward")
    operation = rl.training.forward_backward(batch, LOSS)
    values: list[float] = []

    async def wait() -> None:
        values.append((await operation).value)

    threads = [threading.Thread(target=asyncio.run, args=(wait(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert hold.reached.wait(30)
    hold.open()
    for thread in threads:
        thread.join(30)
    assert values == [1, 1, 1]
    assert asyncio.run(_of(operation)) == 1  # and by one more, after it has ended


async def _of(operation: object) -> float:
    return (await operation).value  # type: ignore[misc]


def test_a_cancelled_awaiter_does_not_cancel_the_operation(
    rl: Session, double: Double, batch: Batch
) -> None:
    hold = double.hold("forward_backward")
    operation = rl.training.forward_backward(batch, LOSS)

    async def main() -> None:
        async def wait() -> None:
            await operation

        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)  # it has begun to wait
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not operation.done()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await operation
        hold.open()
        assert (await operation).value == 1

    asyncio.run(main())
    assert double.names() == ["forward_backward"]


def test_a_failure_is_raised_once_and_logged_nowhere(
    rl: Session, double: Double, batch: Batch
) -> None:
    """asyncio complains through its exception handler about a future nobody looked at."""
    double.faults["forward_backward", 1] = BackendError("no")
    complaints: list[dict[str, object]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        with pytest.raises(BackendError, match="no"):
            await rl.training.forward_backward(batch, LOSS)
        await rl.info()  # nothing holds the failed one any longer
        gc.collect()

    asyncio.run(main())
    gc.collect()
    assert complaints == []


def test_async_iteration_gives_samples_as_they_finish(rl: Session, double: Double) -> None:
    double.sample_holds = {index: Hold() for index in range(3)}
    order = [2, 0, 1]

    async def main() -> list[Sample]:
        seen: list[Sample] = []
        double.sample_holds[order[0]].open()
        operation = rl.sampling.generate([[1]], SamplingParams(n=3, max_tokens=2))
        async for sample in operation:
            seen.append(sample)
            if len(seen) < len(order):
                assert not operation.done()  # this one came before the last was drawn
                double.sample_holds[order[len(seen)]].open()
        return seen

    assert [sample.index for sample in asyncio.run(main())] == order


def test_async_iteration_gives_every_sample_once(rl: Session) -> None:
    """Also those that finish together, and after the end."""

    async def main() -> None:
        operation = rl.sampling.generate([[1], [2], [3]], SamplingParams(n=5, max_tokens=2))
        for _ in range(2):
            seen = [(sample.prompt_index, sample.index) async for sample in operation]
            assert sorted(seen) == [(prompt, index) for prompt in range(3) for index in range(5)]

    asyncio.run(main())


def test_a_failure_ends_an_async_iteration_with_itself(rl: Session, double: Double) -> None:
    double.faults["generate", 1] = BackendError("no sampler")

    async def main() -> None:
        with pytest.raises(BackendError, match="no sampler"):
            async for _ in rl.sampling.generate([[1]], SamplingParams(max_tokens=2)):
                pass

    asyncio.run(main())
    rl.close()  # it was looked at


def test_an_abandoned_async_iteration_lets_its_loop_end(rl: Session, double: Double) -> None:
    """A loop that is closed while a sample is awaited does not wait for the sample."""
    double.sample_holds = {0: Hold()}
    operation = rl.sampling.generate([[1]], SamplingParams(n=2, max_tokens=2))

    async def main() -> int:
        seen = 0

        async def iterate() -> None:
            nonlocal seen
            async for _ in operation:
                seen += 1

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(iterate(), 0.3)
        return seen

    ended = threading.Event()
    counts: list[int] = []

    def run() -> None:
        counts.append(asyncio.run(main()))
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    in_time = ended.wait(20)
    double.sample_holds[0].open()
    thread.join()
    assert in_time
    assert counts == [1]
    assert len(operation.result()[0]) == 2  # it went on


def test_more_async_iterations_than_threads(rl: Session, double: Double) -> None:
    """Sixty iterations at once on one loop: none waits for another's."""
    double.sample_holds = {1: Hold()}

    async def main() -> list[int]:
        first: list[Sample] = []

        async def iterate() -> list[int]:
            seen = []
            async for sample in rl.sampling.generate([[1]], SamplingParams(n=2, max_tokens=2)):
                seen.append(sample.index)
                if sample.index == 0:
                    first.append(sample)
                if len(first) == 60:  # every one has its first sample while none is done
                    double.sample_holds[1].open()
            return seen

        every = await asyncio.wait_for(asyncio.gather(*(iterate() for _ in range(60))), 60)
        assert all(seen == [0, 1] for seen in every)
        return every[0]

    assert asyncio.run(main()) == [0, 1]


def test_async_with_drains_without_holding_the_loop(
    session_factory: SessionFactory, double: Double, batch: Batch
) -> None:
    hold = double.hold("forward")

    async def loop() -> list[str]:
        events = []
        async with session_factory(double) as rl:
            rl.training.forward(batch)
            await asyncio.to_thread(hold.reached.wait, 60)
            asyncio.get_running_loop().call_later(0.01, hold.open)  # runs while the exit waits
            events.append("leaving")
        events.append("left")
        return events

    assert asyncio.run(loop()) == ["leaving", "left"]
    assert double.names() == ["forward"]


def test_a_result_is_converted_once_and_not_on_the_loop(mocked: Session) -> None:
    operation = mocked.sampling.generate([[1]], SamplingParams(max_tokens=2))
    assert operation.result(60) is operation.result(60)
