"""What a run says that it has done is what it has done."""

import asyncio

import numpy as np
import pytest
from dispatcher_fakes import (
    BATCH,
    FORWARD_BACKWARD,
    OPTIM_STEP,
    generate,
    in_loop,
    running,
    settle,
)
from hypothesis import given
from hypothesis import strategies as st

from remote_rl.dispatcher.statistics import SECONDS, VERSIONS, Tally, public_class
from remote_rl.errors import BackendError, ConflictError, InvalidRequestError, RunLostError
from remote_rl.messages import Observe
from remote_rl.requests import Generate, Save
from remote_rl.run_info import Distribution
from remote_rl.types import Generation, Sample, SamplingParams

OUTSIDE = Generate(prompts=[[4000]], params=SamplingParams(max_tokens=1))


async def status_of(talk):
    return await talk.dispatcher.handle(Observe())


async def operation(talk, name):
    found = [each for each in (await status_of(talk)).operations if each.name == name]
    return found[0] if found else None


@in_loop
async def test_a_fresh_run_has_done_nothing_and_says_who_is_there():
    async with running(client=None) as talk:
        status = await status_of(talk)
        assert (status.backend, status.model, status.clients) == ("fake", "tiny", 0)
        assert status.operations == ()
        assert not any((status.driver, status.paused, status.stopping, status.lost))
        assert (status.recent_mean, status.recent_max, status.last_failure) == (None, None, None)
        await talk.grant("a")
        await talk.grant("m", epoch=1)
        await talk.result("pause", 1)
        await talk.clock.advance(3)
        status = await status_of(talk)
        assert (status.clients, status.driver, status.paused) == (2, True, True)
        assert status.uptime == 3.0


@in_loop
async def test_queued_running_and_ended_are_told_apart_with_their_seconds():
    async with running() as talk:
        held = talk.backend.hold("forward_backward")
        first = asyncio.ensure_future(talk.outcome("forward_backward", 1, FORWARD_BACKWARD))
        await held.begun.wait()
        second = asyncio.ensure_future(talk.outcome("forward_backward", 2, FORWARD_BACKWARD))
        await settle()
        counts = await operation(talk, "forward_backward")
        assert (counts.queued, counts.running, counts.succeeded) == (1, 1, 0)
        await talk.clock.advance(4)
        held.open()
        await first
        await second
        counts = await operation(talk, "forward_backward")
        assert (counts.queued, counts.running, counts.succeeded) == (0, 0, 2)
        assert (counts.queue_seconds.total, counts.queue_seconds.count) == (4.0, 2)
        assert (counts.run_seconds.total, counts.run_seconds.count) == (4.0, 2)
        assert counts.run_seconds.mean == 2.0
        ragged = (BATCH.prompts, BATCH.responses, BATCH.mask)
        arrays = [array for each in ragged for array in (each.values, each.offsets)]
        arrays += [BATCH.prompt_index, BATCH.temperature]
        once = {id(array): array.nbytes for array in arrays}  # two of them share their offsets
        assert counts.received_bytes == 2 * sum(once.values())


@in_loop
async def test_failures_count_by_their_class_whatever_ended_them():
    async with running(stall_timeout=1000.0) as talk:
        talk.backend.failures["forward_backward"] = KeyError("a bug")
        await talk.error("forward_backward", 1, FORWARD_BACKWARD)
        await talk.error("forward_backward", 2, FORWARD_BACKWARD)  # dirty
        with pytest.raises(InvalidRequestError):
            await talk.submit("generate", 1, OUTSIDE)
        talk.backend.hold("generate")
        waiting = asyncio.ensure_future(talk.error("generate", 2, generate(), deadline=2.0))
        await settle()
        await talk.clock.advance(3)
        await waiting
        await talk.cancel("optim_step", 4)  # before it came
        failed = {each.name: each.failed for each in (await status_of(talk)).operations}
        assert failed["forward_backward"] == {"BackendError": 1, "DirtyGradientsError": 1}
        assert failed["generate"]["DeadlineExceededError"] == 1
        assert sum(failed["generate"].values()) == 1
        refused = {each.name: each.refused for each in (await status_of(talk)).operations}
        assert refused["generate"] == {"InvalidRequestError": 1}  # it never was one
        last = (await status_of(talk)).last_failure
        assert last.error in ("DeadlineExceededError", "OperationCancelled")
        for each in (await status_of(talk)).operations:
            assert (each.queued, each.running) == (0, 0), each


@in_loop
async def test_nothing_stays_in_flight_where_clients_leave_or_the_run_is_lost():
    async with running() as talk:
        talk.backend.hold("generate")
        held = talk.backend.hold("forward_backward")
        await talk.submit("forward_backward", 1, FORWARD_BACKWARD)
        await talk.submit("forward_backward", 2, FORWARD_BACKWARD)
        await talk.submit("optim_step", 9, OPTIM_STEP)  # a gap holds it
        await talk.submit("generate", 1, generate())
        await held.begun.wait()
        await talk.detach()
        held.open()
        await settle()
        for each in (await status_of(talk)).operations:
            assert (each.queued, each.running) == (0, 0), each
    async with running() as talk:
        talk.backend.hold("generate")
        await talk.submit("generate", 1, generate())
        await talk.submit("optim_step", 9, OPTIM_STEP)
        talk.backend.failures["forward_backward"] = RunLostError("the engine is gone")
        await talk.error("forward_backward", 1, FORWARD_BACKWARD)
        status = await status_of(talk)
        assert "engine is gone" in status.lost
        assert [(each.queued, each.running) for each in status.operations] == [(0, 0)] * 3


@in_loop
async def test_staleness_is_the_trainers_version_when_a_sample_ended():
    async with running() as talk:
        held = talk.backend.hold("generate")
        waiting = asyncio.ensure_future(talk.result("generate", 1, generate(n=3)))
        await held.begun.wait()  # its first sample has ended, at version 0
        await talk.step(1)
        await talk.step(3)
        held.open()
        await waiting
        status = await status_of(talk)
        assert status.versions.trainer == 2
        assert dict(zip(status.staleness.bounds, status.staleness.counts))[0] == 1
        assert dict(zip(status.staleness.bounds, status.staleness.counts))[2] == 2
        assert (status.recent_max, status.recent_mean) == (2, pytest.approx(4 / 3))
        assert (status.generated_samples, status.generated_tokens) == (3, 6)


@in_loop
async def test_samples_of_pushed_weights_ahead_of_the_trainer_are_not_stale():
    async with running() as talk:
        sample = Sample(
            tokens=np.array([1]),
            logprobs=np.zeros(1),
            finish_reason="stop",
            first_version=7,
            last_version=7,
            prompt_index=0,
            index=0,
        )
        talk.backend.answers["generate"] = Generation.from_samples([sample])
        await talk.result("generate", 1, generate())
        assert (await status_of(talk)).recent_max == 0


@in_loop
async def test_a_resent_operation_counts_once(tmp_path):
    async with running(checkpoint_dir=tmp_path) as talk:
        for _ in range(3):
            await talk.result("save", 1, Save(name="a"))
        with pytest.raises(ConflictError):
            await talk.submit("zero_grad", 1)
        assert (await operation(talk, "save")).succeeded == 1
        refused = await operation(talk, "zero_grad")
        assert (refused.ended, refused.failed) == (0, {})
        assert refused.refused == {"ConflictError": 1}


def test_an_error_of_a_backends_own_class_counts_as_the_trees():
    class Mine(BackendError):
        pass

    assert public_class(Mine("x")) == "BackendError"


@given(st.lists(st.floats(0, 1e5)), st.sampled_from([SECONDS, VERSIONS]))
def test_a_tally_counts_every_number_where_it_lies(numbers, bounds):
    tally = Tally(bounds)
    for number in numbers:
        tally.add(number)
    counted = tally.distribution()
    assert counted.count == len(numbers)
    assert counted.total == pytest.approx(sum(numbers))
    for position, bound in enumerate(bounds):
        assert sum(counted.counts[: position + 1]) == sum(one <= bound for one in numbers)


@pytest.mark.parametrize(
    ("bounds", "counts"), [((1, 2), (1, 2)), ((2, 1), (0, 0, 0)), ((1, 1), (0, 0, 0))]
)
def test_a_distribution_that_makes_no_sense_is_refused(bounds, counts):
    with pytest.raises(InvalidRequestError, match=r"Distribution\.counts"):
        Distribution(bounds=bounds, counts=counts, total=0.0)
