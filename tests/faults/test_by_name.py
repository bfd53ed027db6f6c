"""Conflicts, gaps, tombstones, lease ends and late resends, each by name, over each transport,
with faults and without.

What of this is not repeated here because it is tested message by message: other contents under a
used number, acknowledged numbers, gaps, tombstones, deadlines in tests/dispatcher/
test_dispatcher_operations.py and test_streams.py; ends of leases in test_dispatcher_runs.py and
test_leases.py; cancels and late controls through a session in tests/client/
test_cancel_and_deadlines.py and test_abort_and_pause.py; a restarted server in
test_lost_servers.py there.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from dispatcher_fakes import FORWARD_BACKWARD, OPTIM_STEP, generate
from faults_lines import over_each_line, talking

from remote_rl.errors import ConflictError, LeaseError, OperationCancelled
from remote_rl.messages import Detached
from remote_rl.requests import Abort, Snapshot

STEP = ("forward_backward", "optim_step")


# -- conflicts ------------------------------------------------------------------------------------


@over_each_line
async def test_the_same_number_with_another_digest_is_a_conflict(line: str) -> None:
    async with talking(line) as talk:
        await talk.result("snapshot", 1, Snapshot(name="a"), digest="a")
        with pytest.raises(ConflictError, match="already a snapshot of other contents"):
            await talk.submit("snapshot", 1, Snapshot(name="b"), digest="b")
        await talk.result("zero_grad", 2)
        assert talk.backend.calls == ["snapshot", "zero_grad"]


@over_each_line
async def test_a_late_duplicate_of_an_acknowledged_number_is_a_conflict_and_never_executed(
    line: str,
) -> None:
    async with talking(line) as talk:
        await talk.result("forward_backward", 1, FORWARD_BACKWARD, digest="d")
        await talk.wait(acknowledged=[("training", 1)])
        for _ in range(3):
            with pytest.raises(ConflictError, match="finished and acknowledged"):
                await talk.submit("forward_backward", 1, FORWARD_BACKWARD, digest="d")
        await talk.result("optim_step", 2, OPTIM_STEP)
        assert talk.backend.calls == list(STEP)


@over_each_line
async def test_dedup_keys_of_two_clients_with_equal_numbers_do_not_clash(line: str) -> None:
    """Equal numbers and equal digests of driver and member are two operations each."""
    async with talking(line) as talk:
        await talk.grant("m", epoch=1, instance_id=talk.instance_id)
        for number in (1, 2, 3):
            for client in ("a", "m"):
                await talk.result(
                    "forward_backward", number, FORWARD_BACKWARD, client=client, digest="same"
                )
        assert talk.backend.calls == ["forward_backward"] * 6


@over_each_line
async def test_resent_steps_count_once(line: str) -> None:
    """A resent forward_backward does not double the gradient, a resent optim_step takes one
    step."""
    async with talking(line) as talk:
        for turn in range(5):
            for _ in range(3):
                first = await talk.result("forward_backward", 2 * turn + 1, FORWARD_BACKWARD)
                step = await talk.result("optim_step", 2 * turn + 2, OPTIM_STEP)
                assert (first.version, step.version) == (turn, turn + 1)
        assert talk.backend.calls == list(STEP) * 5


# -- gaps -----------------------------------------------------------------------------------------


@over_each_line
async def test_a_gap_is_held_until_the_lost_number_arrives(line: str) -> None:
    async with talking(line, lease_seconds=60.0) as talk:
        for number in (5, 4, 3, 2):
            await talk.submit("zero_grad", number)
        for _ in range(10):  # however long it lasts: the lease is kept
            await talk.clock.advance(50)
            await talk.renew()
        assert talk.backend.calls == []
        assert not (await talk.submit("zero_grad", 5)).done
        await talk.result("snapshot", 1, Snapshot(name="a"))
        await talk.result("zero_grad", 5)
        assert talk.backend.calls == ["snapshot", *["zero_grad"] * 4]


@over_each_line
async def test_a_gap_ends_with_the_lease_and_then_no_number_is_accepted(line: str) -> None:
    async with talking(line, lease_seconds=60.0) as talk:
        await talk.submit("zero_grad", 2)
        await talk.clock.advance(61)
        for number in (1, 2, 3):
            with pytest.raises(LeaseError, match="not renewed"):
                await talk.submit("zero_grad", number)
        await talk.grant("b")
        await talk.result("snapshot", 1, Snapshot(name="a"), client="b")
        assert talk.backend.calls == ["snapshot"]


# -- tombstones -----------------------------------------------------------------------------------


@over_each_line
async def test_a_cancel_that_overtakes_its_operation_buries_it(line: str) -> None:
    async with talking(line) as talk:
        assert await talk.cancel("snapshot", 1)
        for _ in range(2):
            error = await talk.error("snapshot", 1, Snapshot(name="a"), digest="d")
            assert type(error) is OperationCancelled
        await talk.result("zero_grad", 2)
        assert talk.backend.calls == ["zero_grad"]


@over_each_line
async def test_a_tombstone_inside_a_gap_keeps_its_place(line: str) -> None:
    async with talking(line) as talk:
        await talk.submit("zero_grad", 3)
        assert await talk.cancel("snapshot", 2)
        assert type(await talk.error("snapshot", 2, Snapshot(name="a"))) is OperationCancelled
        assert talk.backend.calls == []
        await talk.result("zero_grad", 1)
        await talk.result("zero_grad", 3)
        assert talk.backend.calls == ["zero_grad", "zero_grad"]


@over_each_line
async def test_a_late_cancel_of_what_has_run_changes_nothing(line: str) -> None:
    async with talking(line) as talk:
        await talk.result("forward_backward", 1, FORWARD_BACKWARD)
        assert not await talk.cancel("forward_backward", 1)
        await talk.result("optim_step", 2, OPTIM_STEP)
        assert talk.backend.calls == list(STEP)


# -- ends of leases -------------------------------------------------------------------------------


async def expire(talk: Any) -> None:
    await talk.clock.advance(61)


async def take_over(talk: Any) -> None:
    await talk.grant("b", takeover=True, start="current")


async def detach(talk: Any) -> None:
    await talk.detach("a")


ENDS = pytest.mark.parametrize("end", [expire, take_over, detach])


async def refused(talk: Any, client: str = "a") -> None:
    """Whatever an ended client sends, it has no right to."""
    with pytest.raises(LeaseError):
        await talk.submit("forward_backward", 1, FORWARD_BACKWARD, client=client, digest="d")
    with pytest.raises(LeaseError):
        await talk.submit("optim_step", 9, OPTIM_STEP, client=client)
    with pytest.raises(LeaseError):
        await talk.submit("generate", 1, generate(), client=client)
    with pytest.raises(LeaseError):
        await talk.cancel("zero_grad", 1, client=client)
    with pytest.raises(LeaseError):
        await talk.wait(client)
    with pytest.raises(LeaseError):
        await talk.renew(client)
    with pytest.raises(LeaseError):
        await talk.attach(client, start="current")
    assert await talk.detach(client) == Detached()


@ENDS
@over_each_line
async def test_late_resends_after_a_drivers_lease_are_refused_and_never_executed(
    line: str, end: Any
) -> None:
    async with talking(line, lease_seconds=60.0) as talk:
        await talk.result("forward_backward", 1, FORWARD_BACKWARD, digest="d")
        await end(talk)
        await refused(talk)
        assert talk.backend.calls == ["forward_backward"]


@ENDS
@over_each_line
async def test_a_members_rights_end_with_its_drivers_epoch(line: str, end: Any) -> None:
    async with talking(line, lease_seconds=60.0) as talk:
        await talk.grant("m", epoch=1, instance_id=talk.instance_id)
        await talk.result("forward_backward", 1, FORWARD_BACKWARD, client="m", digest="d")
        await end(talk)
        await refused(talk, "m")
        assert talk.backend.calls == ["forward_backward"]


@over_each_line
async def test_a_members_lease_ends_alone(line: str) -> None:
    async with talking(line, lease_seconds=60.0) as talk:
        await talk.grant("m", epoch=1, instance_id=talk.instance_id)
        await talk.submit("zero_grad", 2, client="m")
        await talk.clock.advance(40)
        await talk.renew()
        await talk.clock.advance(40)
        await refused(talk, "m")
        await talk.result("zero_grad", 1)
        assert talk.backend.calls == ["zero_grad"]


@ENDS
@over_each_line
async def test_a_delayed_duplicate_of_the_old_drivers_gradient_is_not_the_new_drivers(
    line: str, end: Any
) -> None:
    """It comes between the new driver's forward_backward and its step, and is in neither."""
    async with talking(line, lease_seconds=60.0) as talk:
        old: dict[str, Any] = {"digest": "d", "client": "a"}
        await talk.submit("forward_backward", 1, FORWARD_BACKWARD, **old)
        await talk.result("zero_grad", 2)
        await end(talk)
        if end is not take_over:
            await talk.grant("b", start="current")
        await talk.result("forward_backward", 1, FORWARD_BACKWARD, client="b", digest="d")
        with pytest.raises(LeaseError):
            await talk.submit("forward_backward", 1, FORWARD_BACKWARD, **old)
        with pytest.raises(LeaseError):
            await talk.submit("forward_backward", 3, FORWARD_BACKWARD, **old)
        await talk.result("optim_step", 2, OPTIM_STEP, client="b")
        assert talk.backend.calls == ["forward_backward", "zero_grad", *STEP]


# -- control that comes late ----------------------------------------------------------------------


@over_each_line
async def test_a_late_pause_does_not_stop_sampling(line: str) -> None:
    """An old one that is new to the run, and a duplicate of one that has been done."""
    async with talking(line) as talk:
        await talk.result("pause", 2)
        await talk.result("resume", 3)
        for number in (1, 2):
            await talk.result("pause", number)
        assert not (await talk.result("info", 1)).paused
        assert talk.backend.calls == ["pause", "resume"]


@over_each_line
async def test_a_late_resume_does_not_start_sampling(line: str) -> None:
    async with talking(line) as talk:
        await talk.result("resume", 2)
        await talk.result("pause", 3)
        for number in (1, 2):
            await talk.result("resume", number)
        assert (await talk.result("info", 1)).paused
        assert talk.backend.calls == ["resume", "pause"]


@over_each_line
async def test_a_late_abort_does_not_reach_what_was_called_after_it(line: str) -> None:
    async with talking(line) as talk:
        gate = talk.backend.hold("generate")
        await talk.submit("generate", 1, generate(n=2))
        await gate.begun.wait()
        await talk.result("abort", 1, Abort(), generates_before=1)
        await talk.submit("generate", 2, generate(n=2))
        await talk.result("abort", 1, Abort(), generates_before=1)
        await talk.result("abort", 2, Abort(), generates_before=1)
        gate.open()
        aborted = await talk.result("generate", 1, generate(n=2))
        untouched = await talk.result("generate", 2, generate(n=2))
        assert list(aborted.samples())[1].finish_reason == "abort"
        assert list(untouched.samples())[1].finish_reason == "stop"


# -- what was found -------------------------------------------------------------------------------


@pytest.mark.parametrize("asked_before", [True, False])
@over_each_line
async def test_an_outcome_whose_answer_nobody_heard_is_brought_by_a_wait(
    line: str, asked_before: bool
) -> None:
    """Of two copies of a submit the one that waits for the result is a duplicate, or of a
    connection that is dead, and the one that is heard was told "not yet"."""
    async with talking(line) as talk:
        gate = talk.backend.hold("zero_grad")
        unheard = asyncio.ensure_future(talk.submit("zero_grad", 1, linger=30.0))
        await gate.begun.wait()
        assert not (await talk.submit("zero_grad", 1)).done
        wait = asyncio.ensure_future(talk.wait(timeout=30.0))
        if not asked_before:
            gate.open()
            await unheard
        gate.open()
        (outcome,) = (await wait).outcomes
        assert (outcome.number, outcome.done, outcome.error) == (1, True, None)
        assert (await unheard).done
        await talk.wait(acknowledged=[("training", 1)])
        assert not (await talk.wait()).outcomes
