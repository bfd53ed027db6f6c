"""A generate as a stream of samples, in blocking code; the async half is in
test_operations_async."""

from __future__ import annotations

import threading

import pytest
from client_double import Double, Hold

from remote_rl import Sample, SamplingParams, Session
from remote_rl.errors import BackendError, OperationCancelled


def test_samples_come_as_they_finish(rl: Session, double: Double) -> None:
    """Each is let go only after the one before was seen, so all of them came before the end."""
    order = [2, 0, 3, 1]
    double.sample_holds = {index: Hold() for index in order}
    double.sample_holds[order[0]].open()
    operation = rl.sampling.generate([[1]], SamplingParams(n=4, max_tokens=2))
    seen: list[int] = []
    for sample in operation:
        seen.append(sample.index)
        if len(seen) < len(order):
            assert not operation.done()
            double.sample_holds[order[len(seen)]].open()
    assert seen == order
    assert [sample.index for sample in operation.result()[0]] == [0, 1, 2, 3]


def test_every_sample_once_whatever_the_shape(rl: Session) -> None:
    operation = rl.sampling.generate([[1], [2], [3]], SamplingParams(n=5, max_tokens=2))
    seen = [(sample.prompt_index, sample.index) for sample in operation]
    assert sorted(seen) == [(prompt, index) for prompt in range(3) for index in range(5)]


def test_iterating_twice_and_after_the_end(rl: Session) -> None:
    operation = rl.sampling.generate([[1]], SamplingParams(n=3, max_tokens=2))
    operation.result()
    for _ in range(2):
        assert [sample.index for sample in operation] == [0, 1, 2]


def test_two_threads_iterate_one_generate(rl: Session, double: Double) -> None:
    double.sample_holds = {1: Hold()}
    operation = rl.sampling.generate([[1]], SamplingParams(n=3, max_tokens=2))
    seen: list[list[int]] = [[], []]

    def iterate(mine: list[int]) -> None:
        mine += [sample.index for sample in operation]

    threads = [threading.Thread(target=iterate, args=(mine,)) for mine in seen]
    for thread in threads:
        thread.start()
    assert double.sample_holds[1].reached.wait(60)
    double.sample_holds[1].open()
    for thread in threads:
        thread.join(60)
    assert [sorted(mine) for mine in seen] == [[0, 1, 2], [0, 1, 2]]


def test_leaving_an_iteration_early_cancels_nothing(rl: Session, double: Double) -> None:
    double.sample_holds = {1: Hold()}
    operation = rl.sampling.generate([[1]], SamplingParams(n=2, max_tokens=2))
    first: Sample = next(iter(operation))
    assert first.index == 0
    double.sample_holds[1].open()
    assert len(operation.result()[0]) == 2


def test_a_failure_ends_the_iteration_with_itself(rl: Session, double: Double) -> None:
    double.faults["generate", 1] = BackendError("no sampler")
    operation = rl.sampling.generate([[1]], SamplingParams(n=2, max_tokens=2))
    with pytest.raises(BackendError, match="no sampler"):
        list(operation)
    rl.close()  # it was looked at


def test_a_cancelled_iteration_ends(rl: Session, double: Double) -> None:
    double.sample_holds = {1: Hold()}
    operation = rl.sampling.generate([[1]], SamplingParams(n=2, max_tokens=2))
    iterator = iter(operation)
    assert next(iterator).index == 0
    operation.cancel()
    with pytest.raises(OperationCancelled):
        list(iterator)


def test_many_generates_iterated_one_after_the_other(rl: Session) -> None:
    operations = [
        rl.sampling.generate([[1]], SamplingParams(n=2, max_tokens=2)) for _ in range(100)
    ]
    assert [[sample.index for sample in operation] for operation in operations] == [[0, 1]] * 100
