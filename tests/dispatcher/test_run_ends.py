"""What ends a run, what must not, and what ends when it does."""

import asyncio
import contextlib
import threading

import pytest
from dispatcher_fakes import (
    FORWARD_BACKWARD,
    OPTIM_STEP,
    FakeBackend,
    FakeClock,
    generate,
    in_loop,
    running,
    settle,
)

from remote_rl.dispatcher import Dispatcher
from remote_rl.dispatcher.clock import LONGEST_GAP, AwakeClock
from remote_rl.errors import (
    BackendError,
    DeadlineExceededError,
    LeaseError,
    RunLostError,
    StalledError,
)
from remote_rl.messages import Occupied
from remote_rl.requests import Save


class Stubborn(FakeBackend):
    """Heeds no cancellation of the operations in `stubborn`, until `let_go` is set."""

    def __init__(self, *stubborn):
        super().__init__()
        self.stubborn = stubborn
        self.begun, self.let_go = asyncio.Event(), asyncio.Event()

    async def _do(self, name, context, result=None):
        if name in self.stubborn:
            self.begun.set()
            while not self.let_go.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await self.let_go.wait()
        return await super()._do(name, context, result)

    async def generate(self, request, context):
        if "generate" in self.stubborn:
            await self._do("generate", context)
        return await super().generate(request, context)


# -- time in which the dispatcher itself did not run ----------------------------------------------


def test_a_gap_in_which_nobody_looked_counts_little():
    inner = FakeClock()
    clock = AwakeClock(inner)
    begin = clock.now()
    for _ in range(10):
        inner.jump(0.5)
        clock.now()
    assert clock.now() - begin == 5
    inner.jump(3600)
    assert clock.now() - begin == 5 + LONGEST_GAP
    inner.jump(0.5)
    assert clock.now() - begin == 5.5 + LONGEST_GAP


@in_loop
async def test_a_stop_of_the_dispatcher_ends_no_lease_no_deadline_and_no_operation():
    """Messages and signs of life waited unread."""
    async with running(stall_timeout=20.0) as talk:
        talk.backend.hold("generate")
        drawn = asyncio.create_task(talk.error("generate", 1, generate(), deadline=40.0))
        gate = talk.backend.hold("zero_grad")
        await talk.submit("zero_grad", 1)
        await gate.begun.wait()
        talk.clock.jump(3600)
        await talk.clock.advance(1)
        assert isinstance(await talk.attach("b"), Occupied)
        await talk.renew()
        assert not drawn.done()
        gate.open()
        await talk.result("zero_grad", 1)
        await talk.clock.advance(20)
        assert type(await drawn) is StalledError


# -- an engine that dies --------------------------------------------------------------------------


@in_loop
async def test_the_engines_death_is_told_at_once_while_nothing_runs(tmp_path):
    async with running(checkpoint_dir=tmp_path) as talk:
        await talk.result("save", 1, Save(name="last"))
        waiting = asyncio.create_task(talk.wait(timeout=30.0))
        await settle()
        await asyncio.to_thread(talk.backend.contexts["start"].lost, "worker 3 was killed")
        assert (await waiting).outcomes == ()  # at once
        with pytest.raises(
            RunLostError,
            match=r"backend 'fake' died: worker 3 was killed; connect"
            " to a new run with start= 'last'",
        ) as caught:
            await talk.renew()
        assert caught.value.details == {"last_checkpoint": "last"}
        talk.backend.contexts["start"].lost("once more")
        assert talk.backend.kills == 1
        with pytest.raises(RunLostError, match="worker 3"):
            await talk.attach("b")


@in_loop
async def test_the_engines_death_ends_what_runs_and_what_waits():
    async with running() as talk:
        held = [talk.backend.hold(name) for name in ("forward_backward", "generate")]
        pending = [
            asyncio.create_task(talk.error("forward_backward", 1, FORWARD_BACKWARD)),
            asyncio.create_task(talk.error("optim_step", 2, OPTIM_STEP)),
            asyncio.create_task(talk.error("zero_grad", 9)),
            asyncio.create_task(talk.error("generate", 1, generate())),
        ]
        for each in held:
            await each.begun.wait()
        talk.backend.contexts["forward_backward"].lost("out of memory")
        for task in pending:
            error = await task
            assert type(error) is RunLostError
            assert "out of memory" in error.message
        assert talk.backend.kills == 1
        await settle()
        assert talk.dispatcher.runner.running == set()
        assert "optim_step" not in talk.backend.calls


@in_loop
async def test_a_death_during_the_start_fails_the_start():
    backend = FakeBackend()
    backend.hold("start")
    dispatcher = Dispatcher(backend, clock=FakeClock(), stall_timeout=0.1)
    starting = asyncio.create_task(dispatcher.start())
    await backend.gates["start"].begun.wait()
    backend.contexts["start"].lost("rank 0 left")
    with pytest.raises(RunLostError, match="rank 0 left"):
        await starting
    assert (backend.kills, backend.closes) == (1, 1)


def test_a_supervisor_that_outlives_its_run_disturbs_nobody():
    kept = []

    async def run():
        async with running() as talk:
            kept.append(talk.backend.contexts["start"])

    asyncio.run(run())
    reported = threading.Thread(target=kept[0].lost, args=("late",))
    reported.start()
    reported.join()


@in_loop
async def test_a_lost_run_that_the_backend_raises_says_where_to_go_on(tmp_path):
    async with running(checkpoint_dir=tmp_path) as talk:
        await talk.result("save", 1, Save(name="last"))
        talk.backend.failures["zero_grad"] = RunLostError("every rank is dead", rank=3)
        error = await talk.error("zero_grad", 2)
        assert error.details == {"rank": 3, "last_checkpoint": "last"}
        assert error.message.startswith("every rank is dead; connect to a new run with start=")
        with pytest.raises(RunLostError, match="every rank is dead") as caught:
            await talk.renew()
        assert caught.value.details["last_checkpoint"] == "last"


@in_loop
async def test_a_kill_that_raises_keeps_nobody_waiting(caplog):
    async with running() as talk:

        def kill():
            raise OSError("no such process")

        talk.backend.kill = kill
        talk.backend.contexts["start"].lost("gone")
        with pytest.raises(RunLostError, match="gone"):
            await talk.renew()
        assert "the kill of backend 'fake' failed" in caplog.text
        del talk.backend.kill


@pytest.mark.parametrize("leaves", [SystemExit(3), KeyboardInterrupt()])
@in_loop
async def test_an_exit_inside_start_or_close_is_a_failure_of_the_backend(leaves):
    """asyncio would end the whole loop with it, and whoever waits for it would wait for ever."""
    backend = FakeBackend()
    backend.failures["start"] = leaves
    with pytest.raises(BackendError, match=type(leaves).__name__):
        await Dispatcher(backend, clock=FakeClock()).start()
    backend = FakeBackend()

    async def close():
        raise leaves

    backend.close = close
    dispatcher = Dispatcher(backend, clock=FakeClock())
    await dispatcher.start()
    with pytest.raises(BackendError, match=type(leaves).__name__):
        await dispatcher.close()


# -- what heeds nothing ---------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def stubborn_run(*operations, **options):
    backend = Stubborn(*operations)
    async with running(backend=backend, **options) as talk:
        try:
            yield talk
        finally:
            backend.let_go.set()


@in_loop
async def test_a_stalled_generate_that_heeds_no_cancellation_fails_at_once():
    async with stubborn_run("generate", stall_timeout=20.0) as talk:
        ended = asyncio.create_task(talk.error("generate", 1, generate()))
        await talk.backend.begun.wait()
        await talk.clock.advance(20)
        assert type(await ended) is StalledError
        await talk.result("abort", 2)  # which waits for it
        await talk.result("zero_grad", 1)


@in_loop
async def test_a_generate_that_hangs_after_its_deadline_keeps_its_first_reason():
    async with stubborn_run("generate", stall_timeout=20.0) as talk:
        ended = asyncio.create_task(talk.error("generate", 1, generate(), deadline=5.0))
        await talk.backend.begun.wait()
        await talk.clock.advance(20)
        assert type(await ended) is DeadlineExceededError


@in_loop
async def test_what_was_told_to_end_has_one_stall_timeout_whatever_it_reports():
    async with running(stall_timeout=20.0) as talk:
        talk.backend.hold("generate")
        talk.backend.heeds_aborts = False
        ended = asyncio.create_task(talk.error("generate", 1, generate()))
        await settle()
        for step in range(10):  # healthy
            await talk.clock.advance(15)
            await talk.renew()
            talk.backend.contexts["generate"].progress(step)
        await talk.submit("abort", 1)
        await talk.clock.advance(15)
        talk.backend.contexts["generate"].progress(11, what="winding down")
        assert not ended.done()
        await talk.clock.advance(5)
        assert type(await ended) is StalledError


@in_loop
async def test_a_stalled_step_that_returns_later_is_not_taken_in(tmp_path):
    async with stubborn_run(
        "optim_step", "save", stall_timeout=20.0, checkpoint_dir=tmp_path
    ) as talk:
        await talk.result("forward_backward", 1, FORWARD_BACKWARD)
        ended = asyncio.create_task(talk.error("optim_step", 2, OPTIM_STEP))
        await talk.backend.begun.wait()
        await talk.clock.advance(20)
        assert type(await ended) is RunLostError
        talk.backend.let_go.set()
        await settle()
        assert talk.backend.calls[-1] == "optim_step"
        assert talk.dispatcher.rules.version == 0


@in_loop
async def test_a_stalled_save_that_returns_later_leaves_nothing_under_its_name(tmp_path):
    async with stubborn_run("save", stall_timeout=20.0, checkpoint_dir=tmp_path) as talk:
        ended = asyncio.create_task(talk.error("save", 1, Save(name="late")))
        await talk.backend.begun.wait()
        await talk.clock.advance(20)
        assert type(await ended) is RunLostError
        talk.backend.let_go.set()
        await settle()
        assert talk.backend.calls[-1] == "save"
        assert talk.dispatcher.store.checkpoints() == ()


@in_loop
async def test_a_close_does_not_wait_for_ever_for_what_heeds_nothing(caplog):
    async with stubborn_run("forward_backward", "generate", stall_timeout=0.2) as talk:
        backend = talk.backend
        pending = [
            asyncio.create_task(talk.error("forward_backward", 1, FORWARD_BACKWARD)),
            asyncio.create_task(talk.error("generate", 1, generate())),
        ]
        await backend.begun.wait()
        await settle()
        await asyncio.wait_for(talk.dispatcher.close(), 30)
        for task in pending:
            assert type(await task) is RunLostError
        assert "forward_backward, generate: no heed of a cancellation" in caplog.text
        assert (backend.kills, backend.closes) == (1, 1)


# -- pauses ---------------------------------------------------------------------------------------


@in_loop
async def test_the_newest_of_pauses_and_resumes_decides():
    async with running() as talk:
        gate = talk.backend.hold("pause")
        pause = asyncio.create_task(talk.result("pause", 1))
        await gate.begun.wait()
        resume = asyncio.create_task(talk.result("resume", 2))
        await settle()
        assert talk.backend.calls == ["pause"]  # never both at once
        gate.open()
        await pause
        await resume
        assert talk.backend.calls == ["pause", "resume"]
        assert not talk.dispatcher.rules.paused


@in_loop
async def test_one_that_is_cancelled_in_the_row_lets_nobody_overtake():
    async with running() as talk:
        gate = talk.backend.hold("pause")
        pause = asyncio.create_task(talk.result("pause", 1))
        await gate.begun.wait()
        await talk.submit("resume", 2)
        await talk.cancel("resume", 2)
        last = asyncio.create_task(talk.result("resume", 3))
        await settle()
        assert talk.backend.calls == ["pause"]
        gate.open()
        await pause
        await last
        assert talk.backend.calls == ["pause", "resume"]


@in_loop
async def test_a_resume_that_fails_leaves_the_pause_to_its_asker():
    async with running() as talk:
        await talk.grant("m", epoch=1, instance_id=talk.instance_id)
        await talk.result("pause", 1, client="m")
        talk.backend.failures["resume"] = OSError("no")
        assert type(await talk.error("resume", 1)) is BackendError
        assert talk.dispatcher.rules.paused
        await talk.detach("m")
        await settle()
        assert not talk.dispatcher.rules.paused


@in_loop
async def test_a_pause_that_failed_holds_nothing():
    async with running() as talk:
        await talk.grant("m", epoch=1, instance_id=talk.instance_id)
        await talk.result("pause", 1, client="m")
        talk.backend.failures["pause"] = OSError("no")
        assert type(await talk.error("pause", 1)) is BackendError
        await talk.detach("m")
        await settle()
        assert not talk.dispatcher.rules.paused


@in_loop
async def test_a_pause_whose_asker_leaves_while_it_is_being_done_is_lifted():
    async with running() as talk:
        await talk.grant("m", epoch=1, instance_id=talk.instance_id)
        gate = talk.backend.hold("pause")
        await talk.submit("pause", 1, client="m")
        await gate.begun.wait()
        await talk.detach("m")
        gate.open()
        await settle()
        assert talk.backend.calls == ["pause", "resume"]
        assert not talk.dispatcher.rules.paused


@in_loop
async def test_a_pause_of_another_that_is_on_its_way_is_not_lifted():
    async with running() as talk:
        await talk.grant("m", epoch=1, instance_id=talk.instance_id)
        await talk.result("pause", 1, client="m")
        gate = talk.backend.hold("pause")
        mine = asyncio.create_task(talk.result("pause", 1))
        await gate.begun.wait()
        await talk.detach("m")
        gate.open()
        await mine
        await settle()
        assert talk.dispatcher.rules.paused
        assert talk.backend.calls == ["pause", "pause"]


@in_loop
async def test_a_resume_behind_a_pause_that_stalls_has_its_turn():
    async with stubborn_run("pause", stall_timeout=20.0) as talk:
        pause = asyncio.create_task(talk.error("pause", 1))
        await talk.backend.begun.wait()
        await talk.clock.advance(10)
        resume = asyncio.create_task(talk.result("resume", 2))
        await talk.clock.advance(10)
        assert type(await pause) is StalledError
        await resume
        talk.backend.let_go.set()  # and the pause is done after all, when nobody counts on it
        await settle()
        assert talk.backend.calls == ["resume", "pause", "resume"]
        assert not talk.dispatcher.rules.paused


# -- what must not grow ---------------------------------------------------------------------------


@in_loop
async def test_a_client_that_left_long_ago_is_refused_all_the_same(monkeypatch):
    monkeypatch.setattr("remote_rl.dispatcher.leases.REMEMBERED", 3)
    async with running() as talk:
        for number in range(6):
            await talk.grant(f"m{number}", epoch=1, instance_id=talk.instance_id)
            await talk.detach(f"m{number}")
        with pytest.raises(LeaseError, match="it never attached to this run, or left it long ago"):
            await talk.submit("zero_grad", 1, client="m0")
        with pytest.raises(LeaseError, match="it detached"):
            await talk.submit("zero_grad", 1, client="m5")
        assert len(talk.dispatcher.gate.leases._ended) == 3


@in_loop
async def test_samples_of_an_operation_that_has_its_outcome_are_let_go():
    async with stubborn_run("generate", stall_timeout=20.0) as talk:
        ended = asyncio.create_task(talk.error("generate", 1, generate(n=2)))
        await talk.backend.begun.wait()
        record = next(iter(talk.dispatcher.runner.running))
        await talk.clock.advance(20)
        assert type(await ended) is StalledError
        talk.backend.let_go.set()
        await settle()
        assert "generate" in talk.backend.contexts  # it went on to emit
        assert record.samples == []
