"""Order, exactly-once, cancelling, deadlines, control numbers and answers, by messages."""

import asyncio

import pytest
from dispatcher_fakes import (
    FORWARD_BACKWARD,
    OPTIM_STEP,
    generate,
    in_loop,
    running,
    settle,
)
from hypothesis import given
from hypothesis import strategies as st

from remote_rl.errors import (
    BackendError,
    ConflictError,
    DeadlineExceededError,
    DirtyGradientsError,
    InvalidRequestError,
    OperationCancelled,
    ProtocolError,
    StalledError,
    UnsupportedError,
)
from remote_rl.messages import Cancel, Message, Wait
from remote_rl.ops import OPERATIONS
from remote_rl.requests import Abandon, Abort, Forward, Save, Snapshot, Sync
from remote_rl.types import Done, SamplingParams


def snapshot(number):
    return Snapshot(name=f"s{number}")


# -- order and exactly once ---------------------------------------------------------------------


@given(st.permutations(["snapshot", "zero_grad", "forward", "sync", "set_reference"]))
@in_loop
async def test_operations_execute_by_number_whatever_the_arrival(operations):
    requests = {
        "snapshot": Snapshot(name="s"),
        "forward": Forward(batch=FORWARD_BACKWARD.batch),
        "set_reference": OPERATIONS["set_reference"].request(source="base"),
    }
    numbers = {name: number for number, name in enumerate(sorted(operations), 1)}
    async with running() as talk:
        for name in operations:
            await talk.submit(name, numbers[name], requests.get(name))
        last = max(numbers, key=numbers.get)
        await talk.result(last, numbers[last], requests.get(last))
        assert talk.backend.calls == sorted(operations)


@in_loop
async def test_an_operation_that_is_sent_at_the_outcome_of_another_begins_at_once():
    """A small one ends in the loop's next turn, and its answer waits by no timer."""
    loop, turns = asyncio.get_running_loop(), 0

    def turn():
        nonlocal turns
        turns += 1
        loop.call_soon(turn)

    async with running() as talk:
        await talk.result("zero_grad", 1)
        loop.call_soon(turn)
        for number in range(2, 5):
            assert (await talk.submit("zero_grad", number, linger=30.0)).done
        assert turns == 3


@in_loop
async def test_one_whose_task_is_cancelled_before_its_first_step_holds_nobody_up():
    """As by a backend that ends every task of the loop."""
    async with running() as talk:
        assert not (await talk.submit("zero_grad", 1)).done
        (task,) = (each for each in asyncio.all_tasks() if "lane" in each.get_name())
        assert task.cancel()
        assert type(await talk.error("zero_grad", 1)) is OperationCancelled
        await talk.result("snapshot", 2, snapshot(2))
        assert talk.backend.calls == ["snapshot"]


@in_loop
async def test_a_gap_holds_what_comes_after_until_the_lost_number_arrives():
    async with running() as talk:
        assert not (await talk.submit("optim_step", 2, OPTIM_STEP)).done
        await talk.clock.advance(30)
        assert talk.backend.calls == []
        await talk.submit("forward_backward", 1, FORWARD_BACKWARD)
        assert (await talk.result("optim_step", 2, OPTIM_STEP)).version == 1
        assert talk.backend.calls == ["forward_backward", "optim_step"]


@in_loop
async def test_a_duplicate_executes_once_and_gets_the_same_result():
    async with running() as talk:
        gate = talk.backend.hold("forward_backward")
        await talk.submit("forward_backward", 1, FORWARD_BACKWARD, digest="d")
        await gate.begun.wait()
        again = asyncio.create_task(
            talk.result("forward_backward", 1, FORWARD_BACKWARD, digest="d")
        )
        await settle()
        gate.open()
        first = await again
        assert await talk.result("forward_backward", 1, FORWARD_BACKWARD, digest="d") is first
        assert talk.backend.calls == ["forward_backward"]
        assert talk.dispatcher.rules.accumulated == 1


@in_loop
async def test_a_duplicate_of_a_failure_gets_the_same_failure():
    async with running() as talk:
        talk.backend.failures["generate"] = ValueError("no")
        first = await talk.error("generate", 1, generate())
        assert await talk.error("generate", 1, generate()) is first
        assert talk.backend.calls == ["generate"]


@in_loop
async def test_other_contents_under_a_used_number_are_a_conflict():
    async with running() as talk:
        await talk.result("snapshot", 1, Snapshot(name="a"), digest="a")
        with pytest.raises(ConflictError, match="number 1 is already a snapshot of other contents"):
            await talk.submit("snapshot", 1, Snapshot(name="b"), digest="b")
        with pytest.raises(ConflictError, match="this zero_grad was not accepted"):
            await talk.submit("zero_grad", 1, digest="a")
        await talk.result("zero_grad", 2)
        assert talk.backend.calls == ["snapshot", "zero_grad"]


@in_loop
async def test_an_acknowledged_number_is_a_conflict_never_executed():
    async with running() as talk:
        await talk.result("zero_grad", 1)
        await talk.wait(acknowledged=[("training", 1)])
        with pytest.raises(ConflictError, match="finished and acknowledged"):
            await talk.submit("zero_grad", 1)
        with pytest.raises(ConflictError, match="finished and acknowledged"):
            await talk.cancel("zero_grad", 1)
        assert talk.backend.calls == ["zero_grad"]


@in_loop
async def test_each_client_counts_for_itself():
    async with running() as talk:
        await talk.grant("m", epoch=1, instance_id=talk.instance_id)
        await talk.result("snapshot", 1, Snapshot(name="a"), digest="a")
        await talk.result("snapshot", 1, Snapshot(name="b"), client="m", digest="b")
        assert talk.backend.calls == ["snapshot", "snapshot"]


@in_loop
async def test_generates_run_beside_the_training_lane():
    async with running() as talk:
        gate = talk.backend.hold("forward_backward")
        await talk.submit("forward_backward", 1, FORWARD_BACKWARD)
        await gate.begun.wait()
        assert len(await talk.result("generate", 5, generate(n=2))) == 2  # of any number
        assert (await talk.result("info", 1)).instance_id == talk.instance_id
        assert not (await talk.submit("forward_backward", 1, FORWARD_BACKWARD)).done
        gate.open()


# -- refusals -----------------------------------------------------------------------------------


@in_loop
async def test_what_is_no_operation_or_no_message_is_a_protocol_error():
    async with running() as talk:
        with pytest.raises(ProtocolError, match="'train' with a ZeroGrad is no operation"):
            await talk.submit("train", 1, OPERATIONS["zero_grad"].request())
        with pytest.raises(ProtocolError, match="'save' with a ZeroGrad is no operation"):
            await talk.submit("save", 1, OPERATIONS["zero_grad"].request())
        with pytest.raises(ProtocolError, match="Message is no message that a client sends"):
            await talk.dispatcher.handle(Message())
        with pytest.raises(ProtocolError, match="no stream 'side'"):
            await talk.wait(acknowledged=[("side", 1)])
        for key in (("training",), ("training", "1"), (1, 1), ("training", [1])):
            with pytest.raises(ProtocolError, match="is no stream and number"):
                await talk.wait(acknowledged=[key])
        for cursors in ({"x": 0}, {"1": -1}, {"1": "0"}, {"²": 0}, {"1" * 5000: 0}):
            with pytest.raises(ProtocolError, match="is no number of a generate"):
                await talk.wait(cursors=cursors)
        assert talk.backend.calls == []


@in_loop
async def test_what_the_backend_does_not_declare_takes_no_number():
    async with running() as talk:
        for request in (
            generate(top_p=0.5),
            generate(outputs={"drawn_logprobs"}),
        ):
            with pytest.raises(UnsupportedError, match="backend 'fake' does not offer"):
                await talk.submit("generate", 1, request)
        with pytest.raises(UnsupportedError, match="in flight 'abort' that sync asks for"):
            await talk.submit("sync", 1, Sync(in_flight="abort"))
        with pytest.raises(InvalidRequestError, match="token id 1000, but model 'tiny' has 1000"):
            await talk.submit(
                "generate",
                1,
                OPERATIONS["generate"].request(
                    prompts=[[1000]], params=SamplingParams(max_tokens=1)
                ),
            )
        assert isinstance(await talk.result("zero_grad", 1), Done)
        assert talk.backend.calls == ["zero_grad"]


# -- failures -----------------------------------------------------------------------------------


@in_loop
async def test_what_a_backend_raises_is_a_backend_error_with_its_traceback(caplog):
    async with running() as talk:
        talk.backend.failures["zero_grad"] = RuntimeError("out of memory")
        error = await talk.error("zero_grad", 1)
        assert type(error) is BackendError
        assert error.message == "RuntimeError: out of memory"
        assert "dispatcher_fakes.py" in error.details["traceback"]
        assert "zero_grad failed in the backend" in caplog.text
        talk.backend.failures["zero_grad"] = ConflictError("as it is")
        assert type(await talk.error("zero_grad", 2)) is ConflictError


@in_loop
async def test_a_failed_forward_backward_dirties_until_zero_grad(caplog):
    async with running() as talk:
        talk.backend.failures["forward_backward"] = RuntimeError("out of memory")
        await talk.error("forward_backward", 1, FORWARD_BACKWARD)
        error = await talk.error("optim_step", 2, OPTIM_STEP)
        assert type(error) is DirtyGradientsError
        assert error.__cause__.message == "RuntimeError: out of memory"
        assert type(await talk.error("sync", 3)) is DirtyGradientsError
        assert type(await talk.error("forward_backward", 4, FORWARD_BACKWARD)) is (
            DirtyGradientsError
        )
        await talk.result("zero_grad", 5)
        assert (await talk.step(6)).version == 1


@in_loop
async def test_an_abandoned_number_is_a_failed_forward_backward():
    async with running() as talk:
        error = await talk.error("abandon", 1, Abandon(reason="ValueError: shape"))
        assert error.message == "the client's loss function failed: ValueError: shape"
        assert type(await talk.error("optim_step", 2, OPTIM_STEP)) is DirtyGradientsError


@in_loop
async def test_an_answer_of_the_wrong_class_or_number_is_the_backends_fault():
    async with running() as talk:
        talk.backend.answers["forward"] = Done(version=0)
        error = await talk.error("forward", 1, Forward(batch=FORWARD_BACKWARD.batch))
        assert error.message == ("backend 'fake' answered forward with a Done instead of a Outputs")
        generation = await talk.result("generate", 1, generate(n=3))
        talk.backend.answers["generate"] = generation
        error = await talk.error("generate", 2, generate(n=2))
        assert error.message == "backend 'fake' answered generate with 3 samples instead of 2"


# -- cancelling ---------------------------------------------------------------------------------


@in_loop
async def test_a_cancel_before_the_start_leaves_a_tombstone_and_no_gap():
    async with running() as talk:
        gate = talk.backend.hold("zero_grad")
        await talk.submit("zero_grad", 1)
        await gate.begun.wait()
        await talk.submit("snapshot", 2, snapshot(2))
        assert await talk.cancel("snapshot", 2)
        assert not await talk.cancel("zero_grad", 1)  # it runs: too late
        gate.open()
        await talk.result("sync", 3)
        error = await talk.error("snapshot", 2, snapshot(2))
        assert type(error) is OperationCancelled
        assert error.message == "snapshot was cancelled before it started"
        assert await talk.cancel("snapshot", 2)
        assert talk.backend.calls == ["zero_grad", "sync"]


@in_loop
async def test_a_cancelled_forward_backward_counts_as_failed_where_it_stood():
    async with running() as talk:
        gate = talk.backend.hold("zero_grad")
        await talk.submit("zero_grad", 1)
        await gate.begun.wait()
        await talk.submit("forward_backward", 2, FORWARD_BACKWARD)
        await talk.cancel("forward_backward", 2)
        gate.open()
        await talk.result("zero_grad", 1)  # which came before, and clears nothing after it
        error = await talk.error("optim_step", 3, OPTIM_STEP)
        assert type(error) is DirtyGradientsError
        assert type(error.__cause__) is OperationCancelled


@in_loop
async def test_a_forward_backward_cancelled_right_after_its_call_counts_as_failed():
    async with running() as talk:
        await talk.submit("forward_backward", 1, FORWARD_BACKWARD)  # its turn, but not begun yet
        assert await talk.cancel("forward_backward", 1)
        assert type(await talk.error("optim_step", 2, OPTIM_STEP)) is DirtyGradientsError
        assert talk.backend.calls == []


@in_loop
async def test_a_cancel_that_overtakes_its_operation_is_the_one_that_counts():
    async with running() as talk:
        assert await talk.cancel("forward_backward", 1)
        assert await talk.cancel("generate", 1)
        assert await talk.cancel("forward_backward", 1)
        for operation, request in (
            ("forward_backward", FORWARD_BACKWARD),
            ("generate", generate()),
        ):
            assert type(await talk.error(operation, 1, request, digest="d")) is OperationCancelled
        assert type(await talk.error("optim_step", 2, OPTIM_STEP)) is DirtyGradientsError
        assert talk.backend.calls == []


@in_loop
async def test_a_cancelled_gap_is_no_gap():
    async with running() as talk:
        await talk.submit("zero_grad", 2)
        await talk.cancel("snapshot", 1)
        await talk.result("zero_grad", 2)
        assert talk.backend.calls == ["zero_grad"]


@in_loop
async def test_a_running_generate_ends_early_when_cancelled():
    async with running() as talk:
        gate = talk.backend.hold("generate")
        await talk.submit("generate", 1, generate())
        await gate.begun.wait()
        assert await talk.cancel("generate", 1)
        error = await talk.error("generate", 1, generate())
        assert error.message == "generate was cancelled while it ran"
        assert talk.backend.contexts["generate"].cancelled


@in_loop
async def test_a_cancel_of_nothing_known_is_a_protocol_error():
    async with running() as talk:
        for stream, operation in (("side", "save"), ("training", "train"), ("query", "save")):
            with pytest.raises(ProtocolError, match=f"no '{operation}' in stream '{stream}'"):
                await talk.dispatcher.handle(
                    Cancel(
                        stream=stream,
                        number=1,
                        operation=operation,
                        client_id="a",
                        instance_id=talk.instance_id,
                    )
                )


# -- deadlines and stalls -----------------------------------------------------------------------


@in_loop
async def test_a_deadline_acts_on_a_sequenced_operation_only_before_it_starts():
    async with running() as talk:
        gate = talk.backend.hold("zero_grad")
        await talk.submit("zero_grad", 1, deadline=5.0)
        await gate.begun.wait()
        await talk.submit("snapshot", 2, snapshot(2), deadline=5.0)
        await talk.submit("forward_backward", 3, FORWARD_BACKWARD, deadline=5.0)
        await talk.clock.advance(5)
        gate.open()
        assert isinstance(await talk.result("zero_grad", 1), Done)
        error = await talk.error("snapshot", 2, snapshot(2))
        assert type(error) is DeadlineExceededError
        assert error.message == "the deadline of snapshot passed before it started"
        assert type(await talk.error("optim_step", 4, OPTIM_STEP)) is DirtyGradientsError
        assert talk.backend.calls == ["zero_grad"]


@in_loop
async def test_a_deadline_is_kept_to_the_moment_the_turn_comes():
    async with running() as talk:
        gate = talk.backend.hold("zero_grad")
        await talk.submit("zero_grad", 1)
        await gate.begun.wait()
        await talk.submit("snapshot", 2, snapshot(2), deadline=0.2)
        talk.clock.jump(0.3)  # before the watch looks again
        gate.open()
        error = await talk.error("snapshot", 2, snapshot(2))
        assert type(error) is DeadlineExceededError
        assert talk.backend.calls == ["zero_grad"]


@in_loop
async def test_a_deadline_ends_a_running_generate():
    async with running() as talk:
        talk.backend.hold("generate")
        ended = asyncio.create_task(talk.error("generate", 1, generate(), deadline=5.0))
        await settle()
        await talk.clock.advance(5)
        assert (await ended).message == "the deadline of generate passed while it ran"


@in_loop
async def test_a_stalled_generate_fails_alone_and_says_what_it_was_doing():
    async with running(stall_timeout=20.0) as talk:
        talk.backend.hold("generate")
        ended = asyncio.create_task(talk.error("generate", 1, generate()))
        await settle()
        await talk.clock.advance(15)
        talk.backend.contexts["generate"].progress(3, 10, what="decoding")
        await talk.clock.advance(15)
        assert not ended.done()  # a sign of life: it is trusted for another stall_timeout
        await talk.clock.advance(5)
        error = await ended
        assert type(error) is StalledError
        assert error.message == "generate reported nothing for 20 s; it was last decoding"
        assert talk.backend.kills == 0
        await talk.result("zero_grad", 1)


@in_loop
async def test_generates_held_by_a_pause_do_not_stall_until_they_are_resumed():
    async with running(stall_timeout=20.0, lease_seconds=1000) as talk:
        await talk.result("pause", 1)
        talk.backend.hold("generate")
        ended = asyncio.create_task(talk.error("generate", 1, generate()))
        await settle()
        await talk.clock.advance(100)
        assert not ended.done()
        await talk.result("resume", 2)
        await talk.clock.advance(20)
        assert type(await ended) is StalledError


@in_loop
async def test_a_paused_generate_that_does_not_heed_its_abort_stalls():
    async with running(stall_timeout=20.0) as talk:
        await talk.result("pause", 1)
        talk.backend.hold("generate")
        talk.backend.heeds_aborts = False
        ended = asyncio.create_task(talk.error("generate", 1, generate()))
        await settle()
        await talk.clock.advance(30)
        await talk.submit("abort", 2)
        await talk.clock.advance(20)
        assert type(await ended) is StalledError
        assert (await talk.outcome("abort", 2)).done


@in_loop
async def test_a_pause_that_hangs_stalls_like_any_other():
    async with running(stall_timeout=20.0) as talk:
        talk.backend.hold("pause")
        ended = asyncio.create_task(talk.error("pause", 1))
        await settle()
        await talk.clock.advance(20)
        assert type(await ended) is StalledError
        assert not talk.dispatcher.rules.paused


# -- control ------------------------------------------------------------------------------------


@in_loop
async def test_a_late_pause_is_answered_and_ignored():
    async with running() as talk:
        await talk.result("resume", 2)
        assert isinstance(await talk.result("pause", 1), Done)
        assert talk.backend.calls == ["resume"]
        await talk.result("pause", 3)
        await talk.result("reset_prefix_cache", 4)
        assert talk.backend.calls == ["resume", "pause", "reset_prefix_cache"]


@in_loop
async def test_a_resent_control_operation_is_not_done_twice():
    async with running() as talk:
        first = await talk.result("pause", 1)
        assert await talk.result("pause", 1) is first
        assert talk.backend.calls == ["pause"]


@in_loop
async def test_abort_ends_generates_with_what_they_have():
    async with running() as talk:
        talk.backend.hold("generate")
        for number in (1, 2):
            await talk.submit("generate", number, generate(n=2))
        await settle()
        assert isinstance(await talk.result("abort", 1), Done)
        for number in (1, 2):
            generation = await talk.result("generate", number, generate(n=2))
            reasons = [sample.finish_reason for sample in generation.samples()]
            assert reasons == ["stop", "abort"]


@in_loop
async def test_abort_by_request_id_leaves_the_others():
    async with running() as talk:
        gate = talk.backend.hold("generate")
        for number in (1, 2):
            await talk.submit("generate", number, generate(n=2))
        await settle()
        await talk.result("abort", 1, Abort(request_ids=["a:sampling:2", "a:sampling:99"]))
        assert (await talk.submit("generate", 2, generate(n=2))).done
        assert not (await talk.submit("generate", 1, generate(n=2))).done
        gate.open()
        generation = await talk.result("generate", 1, generate(n=2))
        assert {sample.finish_reason for sample in generation.samples()} == {"stop"}


# -- what a wait brings -------------------------------------------------------------------------


def keys(waited):
    return sorted((outcome.stream, outcome.number) for outcome in waited.outcomes)


@in_loop
async def test_a_wait_brings_outcomes_until_they_are_acknowledged():
    async with running() as talk:
        await talk.submit("zero_grad", 1)
        await talk.submit("generate", 1, generate())
        await settle()
        both = [("sampling", 1), ("training", 1)]
        assert keys(await talk.wait()) == both
        assert keys(await talk.wait()) == both  # the answer may have been lost
        assert keys(await talk.wait(acknowledged=[("training", 1)])) == [("sampling", 1)]
        assert keys(await talk.wait(acknowledged=[("sampling", 1)])) == []


@in_loop
async def test_a_tombstone_is_brought_until_it_is_acknowledged_though_a_gap_keeps_it():
    async with running() as talk:
        await talk.cancel("zero_grad", 2)
        assert keys(await talk.wait()) == [("training", 2)]
        assert keys(await talk.wait(acknowledged=[("training", 2)])) == []
        await talk.submit("zero_grad", 3)
        await talk.result("zero_grad", 1)
        await talk.result("zero_grad", 3)
        assert talk.backend.calls == ["zero_grad", "zero_grad"]


@in_loop
async def test_an_outcome_is_brought_by_the_submit_or_the_wait_not_by_both():
    async with running() as talk:
        await talk.result("zero_grad", 1)
        assert keys(await talk.wait()) == []
        gate = talk.backend.hold("zero_grad")
        lingering = asyncio.create_task(talk.result("zero_grad", 2))
        waiting = asyncio.create_task(talk.wait(timeout=30.0))
        await settle()
        gate.open()
        await lingering
        assert not waiting.done()
        await talk.submit("snapshot", 3, snapshot(3))
        assert keys(await waiting) == [("training", 3)]


@pytest.mark.parametrize("rounds", range(8))
@in_loop
async def test_a_submit_that_broke_off_at_any_moment_is_answered_when_sent_again(rounds):
    async with running() as talk:
        gate = talk.backend.hold("zero_grad")
        broken = asyncio.create_task(talk.result("zero_grad", 1))
        await settle()
        gate.open()
        for _ in range(rounds):
            await asyncio.sleep(0)
        broken.cancel()
        await asyncio.wait([broken])
        assert isinstance(await talk.result("zero_grad", 1), Done)
        assert talk.backend.calls == ["zero_grad"]


@in_loop
async def test_a_wait_brings_progress_once():
    async with running() as talk:
        gate = talk.backend.hold("generate")
        await talk.submit("generate", 1, generate())
        await gate.begun.wait()
        talk.backend.contexts["generate"].progress(2, 8, what="decoding")
        (report,) = (await talk.wait(timeout=30.0)).progress
        assert (report.stream, report.number, report.done, report.total, report.what) == (
            "sampling",
            1,
            2.0,
            8.0,
            "decoding",
        )
        assert (await talk.wait()).progress == ()
        gate.open()


@in_loop
async def test_a_wait_brings_the_samples_that_the_client_lacks():
    async with running() as talk:
        gate = talk.backend.hold("generate")
        await talk.submit("generate", 1, generate(n=2))
        await gate.begun.wait()
        assert (await talk.wait()).partials == ()  # nobody iterates
        (partial,) = (await talk.wait(cursors={"1": 0})).partials
        assert (partial.number, partial.start, len(partial.samples)) == (1, 0, 1)
        assert (await talk.wait(cursors={"1": 1, "7": 0})).partials == ()
        gate.open()
        waited = await talk.wait(timeout=30.0, cursors={"1": 1})
        assert keys(waited) == [("sampling", 1)]
        assert waited.partials == ()  # the outcome has them all


@in_loop
async def test_an_empty_wait_ends_at_its_timeout():
    async with running() as talk:
        assert await talk.wait() == await talk.wait(timeout=0.01)
        with pytest.raises(InvalidRequestError, match=r"Wait.timeout must be"):
            Wait(timeout=601, client_id="a", instance_id="i")


# -- seeds --------------------------------------------------------------------------------------


@in_loop
async def test_unseeded_generates_get_distinct_seeds_that_a_checkpoint_continues(tmp_path):
    async with running(checkpoint_dir=tmp_path) as talk:
        await talk.result("generate", 1, generate())
        gate = talk.backend.hold("save")
        save = asyncio.create_task(talk.result("save", 1, Save(name="a"), generates_before=1))
        await gate.begun.wait()  # what is called while it is written is not in it
        for number in (2, 3):
            await talk.result("generate", number, generate())
        await talk.result("generate", 4, generate(seed=11))
        gate.open()
        await save
        seeds = list(talk.backend.seeds)
        assert seeds[3] == 11
        assert len(set(seeds)) == 4
        await talk.result("load", 2, OPERATIONS["load"].request(name="a"))
        for number in (5, 6):
            await talk.result("generate", number, generate())
        assert talk.backend.seeds[4:] == seeds[1:3]
    async with running(checkpoint_dir=tmp_path) as talk:
        await talk.result("load", 1, OPERATIONS["load"].request(name="a"))
        await talk.result("generate", 1, generate())
        assert talk.backend.seeds == seeds[1:2]
        await talk.result("reset", 2)
        await talk.result("generate", 2, generate())
        assert talk.backend.seeds[1] == seeds[0]
