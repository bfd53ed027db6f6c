"""A stop that the operator asked for: what runs ends, what waits and what is new is refused."""

import asyncio

import pytest
from dispatcher_fakes import FORWARD_BACKWARD, OPTIM_STEP, generate, in_loop, running, settle

from remote_rl.errors import RunLostError
from remote_rl.messages import Observe
from remote_rl.requests import Save
from remote_rl.types.generation import FINISH_REASONS

STOP, ABORT = FINISH_REASONS.index("stop"), FINISH_REASONS.index("abort")
OPERATOR = "the server is being stopped by its operator"


async def begun(talk, grace=30.0):
    drain = asyncio.ensure_future(talk.dispatcher.drain(grace))
    await settle()
    return drain


@in_loop
async def test_what_is_new_is_held_back_and_then_refused(tmp_path):
    async with running(checkpoint_dir=tmp_path) as talk:
        await talk.result("save", 1, Save(name="first"))
        held = talk.backend.hold("forward_backward")
        step = asyncio.ensure_future(talk.result("forward_backward", 2, FORWARD_BACKWARD))
        await held.begun.wait()
        drain = await begun(talk)
        assert (await talk.dispatcher.handle(Observe())).stopping
        waiting = [
            asyncio.ensure_future(talk.error("optim_step", 3, OPTIM_STEP)),
            asyncio.ensure_future(talk.error("generate", 1, generate())),
            asyncio.ensure_future(talk.error("pause", 1)),
        ]
        await settle()
        assert (await talk.result("info", 1)).backend == "fake"  # reads go on
        with pytest.raises(RunLostError, match=OPERATOR):
            await talk.attach("b", takeover=True)
        assert not any(each.done() for each in waiting)
        held.open()
        await step
        await talk.clock.advance(1)
        for each in waiting:
            error = await each
            assert isinstance(error, RunLostError)
            assert OPERATOR in str(error)
            assert error.details["last_checkpoint"] == "first"
        with pytest.raises(RunLostError, match=f"{OPERATOR}.*'first', its last"):
            await talk.submit("info", 2)
        assert (await talk.result("save", 1, Save(name="first"))).name == "first"  # a resent one
        await talk.clock.advance(1)
        await drain
        assert talk.backend.calls == ["save", "forward_backward"]


@in_loop
async def test_a_client_hears_of_the_end_after_the_outcome_of_what_ran():
    async with running() as talk:
        held = talk.backend.hold("forward_backward")
        await talk.submit("forward_backward", 1, FORWARD_BACKWARD)
        await held.begun.wait()
        await talk.submit("optim_step", 2, OPTIM_STEP)
        drain = await begun(talk)
        held.open()
        await talk.clock.advance(1)
        (outcome,) = (await talk.wait()).outcomes
        assert (outcome.number, outcome.error) == (1, None)
        await talk.wait(acknowledged=[("training", 1)])
        await talk.clock.advance(1)
        (outcome,) = (await talk.wait()).outcomes
        assert outcome.number == 2
        assert OPERATOR in str(outcome.error)
        await talk.wait(acknowledged=[("training", 2)])
        await talk.clock.advance(1)
        await drain


@in_loop
async def test_a_step_that_does_not_end_within_the_grace_fails():
    async with running() as talk:
        held = talk.backend.hold("forward_backward")
        first = asyncio.ensure_future(talk.error("forward_backward", 1, FORWARD_BACKWARD))
        await held.begun.wait()
        drain = await begun(talk, grace=3.0)
        await talk.clock.advance(2.5)
        assert not first.done()
        await talk.clock.advance(1)
        assert isinstance(await first, RunLostError)
        await talk.clock.advance(0.5)
        await drain


@in_loop
async def test_generates_may_end_within_the_grace_and_are_then_aborted():
    async with running() as talk:
        talk.backend.hold("generate")
        request = generate(n=2)
        waiting = asyncio.ensure_future(talk.result("generate", 1, request))
        await settle()
        drain = await begun(talk, grace=2.0)
        await talk.clock.advance(1.5)
        assert not waiting.done()
        await talk.clock.advance(1)
        assert (await waiting).finish_reason.tolist() == [STOP, ABORT]
        await talk.clock.advance(1)
        await drain


@in_loop
async def test_paused_generates_are_aborted_at_once_since_none_would_end():
    async with running() as talk:
        talk.backend.hold("generate")
        await talk.result("pause", 1)
        waiting = asyncio.ensure_future(talk.result("generate", 1, generate(n=2)))
        await settle()
        drain = await begun(talk, grace=1000.0)
        assert (await waiting).finish_reason.tolist() == [STOP, ABORT]
        await talk.clock.advance(1)
        await drain


@in_loop
async def test_a_generate_that_heeds_no_abort_fails_and_holds_nothing_up():
    async with running() as talk:
        talk.backend.hold("generate")
        talk.backend.heeds_aborts = False
        waiting = asyncio.ensure_future(talk.error("generate", 1, generate()))
        await settle()
        drain = await begun(talk, grace=0.0)
        await talk.clock.advance(12)
        assert OPERATOR in str(await waiting)
        await drain


@in_loop
async def test_an_outcome_is_kept_until_it_was_fetched_but_not_for_long():
    async with running() as talk:
        talk.backend.hold("generate")
        assert not (await talk.submit("generate", 1, generate())).done
        drain = await begun(talk, grace=0.0)
        await talk.clock.advance(1)
        (outcome,) = (await talk.wait()).outcomes
        assert outcome.result.finish_reason.tolist() == [STOP]
        assert not drain.done()
        await talk.wait(acknowledged=[("sampling", 1)])
        await talk.clock.advance(0.5)
        await drain
    async with running() as talk:
        talk.backend.hold("generate")
        await talk.submit("generate", 1, generate())
        drain = await begun(talk, grace=0.0)
        await talk.clock.advance(12)  # its client was killed, perhaps
        await drain


@in_loop
async def test_after_the_stop_everything_fails_by_its_name():
    async with running() as talk:
        drain = await begun(talk)
        await talk.clock.advance(1)
        await drain
        await talk.dispatcher.close()
        with pytest.raises(RunLostError, match=OPERATOR):
            await talk.renew()
        assert (await talk.dispatcher.lost()).message.startswith(OPERATOR)
