"""Attaching, leases, takeover, the end of a run, and its files, by messages."""

import asyncio

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
from remote_rl.errors import (
    BackendError,
    ConflictError,
    DirtyGradientsError,
    InvalidRequestError,
    LeaseError,
    ProtocolError,
    RunLostError,
    StalledError,
)
from remote_rl.messages import Describe, Occupied, Renewed
from remote_rl.ops import OPERATIONS
from remote_rl.requests import Delete, Export, ListFiles, Load, ReadFile, Save, SetReference
from remote_rl.types import CheckpointInfo, Done

# -- attaching ----------------------------------------------------------------------------------


@in_loop
async def test_a_grant_says_what_the_client_holds():
    async with running(client=None, lease_seconds=42.0) as talk:
        grant = await talk.grant("a", model="tiny")
        assert (grant.client_id, grant.role, grant.epoch) == ("a", "driver", 1)
        assert (grant.instance_id, grant.lease_seconds) == (talk.instance_id, 42.0)
        assert grant.needs_start is None
        assert grant.info.driver
        assert grant.info.pristine
        member = await talk.grant("m", epoch=1, instance_id=talk.instance_id)
        assert member.role == "member"


@in_loop
async def test_anybody_may_ask_what_the_run_is():
    async with running(client=None) as talk:
        info = await talk.dispatcher.handle(Describe())
        assert (info.backend, info.model.name, info.driver) == ("fake", "tiny", False)
        assert "checkpoints" in info.capabilities.operations


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"protocol_versions": [99]}, ProtocolError, r"speaks protocol \[99\] and the server"),
        ({"model": "huge"}, InvalidRequestError, "the run's model is 'tiny', not 'huge'"),
        ({"start": "reference"}, InvalidRequestError, "start must be 'base', 'current' or"),
        ({"start": "gone"}, InvalidRequestError, "there is no checkpoint 'gone'"),
        ({"start": "../x"}, InvalidRequestError, "can't be the name"),
        ({"epoch": 1, "start": "base"}, InvalidRequestError, "are the driver's, not a handle's"),
        ({"epoch": 1, "takeover": True}, InvalidRequestError, "are the driver's"),
        ({"epoch": 3}, LeaseError, "the handle is of epoch 3"),
        ({"epoch": 1, "instance_id": "old"}, RunLostError, "the handle is of a run that is gone"),
    ],
)
@in_loop
async def test_attach_refusals(tmp_path, fields, error, message):
    async with running(client=None, checkpoint_dir=tmp_path) as talk:
        with pytest.raises(error, match=message):
            await talk.attach("a", **fields)
        assert (await talk.grant("a")).role == "driver"  # nothing was granted by the way


@in_loop
async def test_on_a_trained_run_start_must_be_said(tmp_path):
    async with running(checkpoint_dir=tmp_path) as talk:
        await talk.step(1)
        await talk.result("save", 3, Save(name="one"))
        await talk.detach()
        with pytest.raises(InvalidRequestError, match="say where to begin: start='base'"):
            await talk.attach("b")
        for start in ("base", "current", "one"):
            grant = await talk.grant(start, start=start)
            assert grant.needs_start == start
            assert not grant.info.pristine
            # the answer was lost: asked again, it must say so again
            assert await talk.grant(start, start=start) == grant
            await talk.detach(start)


@in_loop
async def test_a_late_duplicate_of_an_attach_is_answered_as_the_first_was():
    async with running() as talk:
        await talk.step(1)
        again = await talk.grant("a")
        assert (again.epoch, again.needs_start) == (1, None)


@in_loop
async def test_a_run_is_pristine_again_after_a_reset():
    async with running() as talk:
        await talk.step(1)
        await talk.result("reset", 3)
        await talk.detach()
        assert (await talk.grant("b")).needs_start is None


@in_loop
async def test_a_forward_backward_that_still_runs_makes_the_run_not_pristine():
    async with running() as talk:
        gate = talk.backend.hold("forward_backward")
        await talk.submit("forward_backward", 1, FORWARD_BACKWARD)
        await gate.begun.wait()
        await talk.detach()
        with pytest.raises(InvalidRequestError, match="say where to begin"):
            await talk.attach("b")
        gate.open()


# -- leases -------------------------------------------------------------------------------------


@in_loop
async def test_a_second_driver_waits_for_the_lease_to_run_out():
    async with running() as talk:
        assert await talk.attach("b") == Occupied(remaining=60.0, renewals=0)
        await talk.clock.advance(45)
        assert await talk.attach("b") == Occupied(remaining=15.0, renewals=0)
        assert await talk.renew() == Renewed(lease_seconds=60.0)
        assert await talk.attach("b") == Occupied(remaining=60.0, renewals=1)
        await talk.clock.advance(60)
        assert (await talk.grant("b")).epoch == 2
        with pytest.raises(LeaseError, match="not renewed for 60 s; connect again"):
            await talk.renew()


@in_loop
async def test_every_message_renews():
    async with running() as talk:
        for number in range(1, 5):
            await talk.clock.advance(40)
            await talk.submit("zero_grad", number)
        await talk.clock.advance(40)
        await talk.wait()
        await talk.clock.advance(40)
        await talk.cancel("zero_grad", 9)
        assert isinstance(await talk.attach("b"), Occupied)


@in_loop
async def test_the_end_of_a_lease_drops_queued_work_and_ends_members():
    async with running() as talk:
        gate = talk.backend.hold("zero_grad")
        await talk.grant("m", epoch=1, instance_id=talk.instance_id)
        await talk.submit("zero_grad", 1)
        await gate.begun.wait()
        dropped = [
            asyncio.create_task(talk.error("sync", 2)),
            asyncio.create_task(talk.error("sync", 9)),  # behind a gap
            asyncio.create_task(talk.error("sync", 1, client="m")),
        ]
        held = talk.backend.hold("generate")
        dropped.append(asyncio.create_task(talk.error("generate", 1, generate(), client="m")))
        await held.begun.wait()
        await talk.clock.advance(60)
        for task in dropped:
            error = await task
            assert type(error) is LeaseError
            assert "holds no lease of the run" in error.message
        for client in ("a", "m"):
            with pytest.raises(LeaseError):
                await talk.renew(client)
        with pytest.raises(LeaseError, match="handle is of epoch 1"):
            await talk.attach("n", epoch=1)
        # what ran goes on, and the next driver's operations come after it
        await talk.grant("b")
        await talk.submit("snapshot", 1, OPERATIONS["snapshot"].request(name="s"), client="b")
        assert talk.backend.calls == ["zero_grad", "generate"]
        gate.open()
        await talk.result("sync", 2, client="b")
        assert talk.backend.calls == ["zero_grad", "generate", "snapshot", "sync"]


@in_loop
async def test_a_gap_ends_with_its_client_and_its_numbers_are_never_accepted():
    async with running() as talk:
        await talk.submit("zero_grad", 2)
        await talk.clock.advance(60)
        with pytest.raises(LeaseError):
            await talk.submit("zero_grad", 1)
        assert talk.backend.calls == []


@in_loop
async def test_a_dropped_forward_backward_does_not_pass_for_the_next_drivers_own():
    async with running() as talk:
        gate = talk.backend.hold("zero_grad")
        await talk.submit("zero_grad", 1)
        await gate.begun.wait()
        await talk.submit("forward_backward", 2, FORWARD_BACKWARD)
        await talk.detach()
        gate.open()
        await settle()
        assert (await talk.grant("b", start="current")).needs_start == "current"
        error = await talk.error("optim_step", 1, OPTIM_STEP, client="b")
        assert type(error) is DirtyGradientsError
        assert type(error.__cause__) is LeaseError
        await talk.result("zero_grad", 2, client="b")
        await talk.result("forward_backward", 3, FORWARD_BACKWARD, client="b")


@in_loop
async def test_takeover_ends_the_driver_and_its_members_at_once():
    async with running() as talk:
        await talk.grant("m", epoch=1, instance_id=talk.instance_id)
        waiting = asyncio.create_task(talk.wait("m", timeout=30.0))
        await settle()
        grant = await talk.grant("b", takeover=True)
        assert (await waiting).outcomes == ()  # at once
        assert grant.epoch == 2
        for client in ("a", "m"):
            with pytest.raises(LeaseError, match="another client took the run over"):
                await talk.submit("zero_grad", 1, client=client)
        await talk.grant("n", epoch=2, instance_id=talk.instance_id)
        assert await talk.grant("b", takeover=True) == grant  # sent again: nobody else ends
        assert await talk.renew("n") == Renewed(lease_seconds=60.0)


@in_loop
async def test_detaching_frees_the_run_and_a_member_detaches_alone():
    async with running() as talk:
        await talk.grant("m", epoch=1, instance_id=talk.instance_id)
        await talk.detach("m")
        await talk.renew("a")
        await talk.detach("a")
        with pytest.raises(LeaseError, match="it detached"):
            await talk.renew("a")
        with pytest.raises(LeaseError, match="held a lease that ended"):
            await talk.attach("a")
        assert (await talk.grant("b")).epoch == 2


@in_loop
async def test_without_a_lease_there_is_no_operation():
    async with running(client=None) as talk:
        with pytest.raises(LeaseError, match="client a holds no lease of the run: it never"):
            await talk.submit("zero_grad", 1)


@in_loop
async def test_a_new_epoch_draws_new_seeds():
    async with running() as talk:
        await talk.result("generate", 1, generate())
        await talk.grant("b", takeover=True)
        await talk.grant("m", epoch=2, instance_id=talk.instance_id)
        await talk.result("generate", 1, generate(), client="b")
        await talk.result("generate", 1, generate(), client="m")
        assert len(set(talk.backend.seeds)) == 3


# -- the end of a run ---------------------------------------------------------------------------


@in_loop
async def test_a_stalled_training_operation_ends_the_run(tmp_path, caplog):
    async with running(stall_timeout=20.0, checkpoint_dir=tmp_path) as talk:
        await talk.step(1)
        await talk.result("save", 3, Save(name="last"))
        talk.backend.hold("forward_backward")
        held = talk.backend.hold("generate")
        pending = [
            asyncio.create_task(talk.error("forward_backward", 4, FORWARD_BACKWARD)),
            asyncio.create_task(talk.error("optim_step", 5, OPTIM_STEP)),
            asyncio.create_task(talk.error("generate", 1, generate())),
        ]
        await held.begun.wait()
        talk.backend.contexts["forward_backward"].progress(1, what="the backward pass")
        await talk.clock.advance(10)
        talk.backend.contexts["generate"].progress(1)
        await talk.clock.advance(10)
        for task in pending:
            error = await task
            assert type(error) is RunLostError
            assert error.details == {"last_checkpoint": "last"}
            assert "forward_backward reported nothing for 20 s; it was last the backward" in str(
                error
            )
            assert type(error.__cause__) is StalledError
        assert talk.backend.kills == 1
        assert talk.backend.contexts["generate"].cancelled
        with pytest.raises(RunLostError, match="the run ended because"):
            await talk.renew()
        with pytest.raises(RunLostError, match="the run ended because"):
            await talk.attach("b")
        assert "the run ends" in caplog.text


@in_loop
async def test_a_stalled_operation_of_a_client_that_is_gone_ends_the_run_too():
    async with running(stall_timeout=100.0) as talk:
        gate = talk.backend.hold("zero_grad")
        await talk.submit("zero_grad", 1)
        await gate.begun.wait()
        await talk.clock.advance(60)
        await talk.grant("b")
        blocked = asyncio.create_task(talk.error("sync", 1, client="b"))
        await talk.clock.advance(39.5)
        assert not blocked.done()
        await talk.clock.advance(0.5)
        assert type(await blocked) is RunLostError
        assert talk.backend.kills == 1


@in_loop
async def test_progress_keeps_a_long_operation_alive():
    async with running(stall_timeout=20.0, lease_seconds=1000.0) as talk:
        gate = talk.backend.hold("forward_backward")
        running_one = asyncio.create_task(talk.result("forward_backward", 1, FORWARD_BACKWARD))
        await gate.begun.wait()
        for step in range(5):
            await talk.clock.advance(15)
            talk.backend.contexts["forward_backward"].progress(step, 5)
        gate.open()
        assert (await running_one).value == 0.5


@in_loop
async def test_who_held_another_run_is_told_where_to_go_on(tmp_path):
    async with running(checkpoint_dir=tmp_path) as talk:
        talk.instance_id = "of an earlier server"
        with pytest.raises(RunLostError, match=r"start= 'base' \(it left no checkpoint\)"):
            await talk.renew()
        talk.instance_id = talk.dispatcher.instance_id
        await talk.result("save", 1, Save(name="step-9"))
        talk.instance_id = "of an earlier server"
        with pytest.raises(RunLostError, match="'step-9', its last checkpoint") as caught:
            await talk.submit("zero_grad", 2)
        assert caught.value.details == {"last_checkpoint": "step-9"}
        with pytest.raises(RunLostError, match="step-9"):
            await talk.attach("b", instance_id="of an earlier server", epoch=1)


@in_loop
async def test_close_ends_everything():
    async with running() as talk:
        talk.backend.hold("forward_backward")
        held = talk.backend.hold("generate")
        pending = [
            asyncio.create_task(talk.error("forward_backward", 1, FORWARD_BACKWARD)),
            asyncio.create_task(talk.error("optim_step", 2, OPTIM_STEP)),
            asyncio.create_task(talk.error("zero_grad", 9)),
            asyncio.create_task(talk.error("generate", 1, generate())),
        ]
        waiting = asyncio.create_task(talk.wait(timeout=30.0))
        await held.begun.wait()
        await talk.dispatcher.close()
        for task in pending:
            error = await task
            assert type(error) is RunLostError
            assert error.message.startswith("the run was closed; connect to a new run with start=")
        assert (await waiting).outcomes == ()  # at once, though nothing was left for it
        assert talk.backend.closes == 1
        with pytest.raises(RunLostError, match="the run was closed"):
            await talk.submit("zero_grad", 10)
        talk.backend.closes -= 1
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert left == set()


@in_loop
async def test_a_start_tells_what_it_does_and_a_failed_one_is_closed():
    heard = []
    dispatcher = Dispatcher(FakeBackend(), clock=FakeClock())
    await dispatcher.start(heard.append)
    await dispatcher.close()
    assert heard == ["loading the model"]
    backend = FakeBackend()
    backend.failures["start"] = BackendError("no such model")
    with pytest.raises(BackendError, match="no such model"):
        await Dispatcher(backend, clock=FakeClock()).start()
    assert backend.closes == 1


# -- checkpoints, exports, files ----------------------------------------------------------------


@in_loop
async def test_save_list_load_delete(tmp_path):
    async with running(checkpoint_dir=tmp_path) as talk:
        await talk.step(1)
        saved = await talk.result("save", 3, Save(name="one", metadata={"step": 1}))
        assert (saved.name, saved.version, saved.optimizer) == ("one", 1, True)
        assert saved.bytes == len(b"saved")
        await talk.step(4)
        loaded = await talk.result("load", 6, Load(name="one"))
        assert (loaded.metadata, loaded.version, loaded.saved_version) == ({"step": 1}, 3, 1)
        assert talk.backend.state == b"saved"
        assert talk.backend.contexts["load"].next_version == 3
        await talk.result("save", 7, Save(name="two", optimizer=False))
        listed = (await talk.result("checkpoints", 8)).checkpoints
        assert [info.name for info in listed] == ["one", "two"]
        assert isinstance(await talk.result("delete", 9, Delete(name="one")), Done)
        error = await talk.error("load", 10, Load(name="one"))
        assert error.message == "there is no checkpoint 'one'; valid names are 'two'"
        error = await talk.error("load", 11, Load(name="two"))
        assert "holds no optimizer state; load it with optimizer=False" in error.message
        assert "start='base' and load" in error.message  # what a connect(start=...) can do
        loaded = await talk.result("load", 12, Load(name="two", optimizer=False))
        assert (loaded.version, loaded.optimizer) == (4, False)


@in_loop
async def test_an_existing_name_and_a_full_accumulator_refuse_a_save(tmp_path):
    async with running(checkpoint_dir=tmp_path) as talk:
        await talk.result("save", 1, Save(name="one"))
        assert type(await talk.error("save", 2, Save(name="one"))) is ConflictError
        await talk.result("forward_backward", 3, FORWARD_BACKWARD)
        error = await talk.error("save", 4, Save(name="two"))
        assert type(error) is ConflictError
        assert talk.backend.calls == ["save", "forward_backward"]


@pytest.mark.parametrize("operation", ["save", "export"])
@in_loop
async def test_a_save_that_fails_leaves_nothing(tmp_path, caplog, operation):
    request = Save(name="one") if operation == "save" else Export(name="one")
    async with running(checkpoint_dir=tmp_path) as talk:
        talk.backend.failures[operation] = OSError("disk full")
        error = await talk.error(operation, 1, request)
        assert error.message == "OSError: disk full"
        assert list(tmp_path.iterdir()) == []
        await talk.result(operation, 2, request)


@in_loop
async def test_a_save_of_a_reference_says_so(tmp_path):
    async with running(checkpoint_dir=tmp_path) as talk:
        await talk.result("set_reference", 1, SetReference(source="current"))
        talk.backend.answers["save"] = True
        saved = await talk.result("save", 2, Save(name="one"))
        assert isinstance(saved, CheckpointInfo)
        assert saved.reference


@in_loop
async def test_files_are_listed_and_read_over_messages(tmp_path):
    async with running(checkpoint_dir=tmp_path) as talk:
        receipt = await talk.result("export", 1, Export(name="model"))
        assert (receipt.files, receipt.bytes, receipt.version) == (("config.json",), 2, 0)
        files = await talk.result("list_files", 1, ListFiles(kind="export", name="model"))
        assert (files.paths, files.sizes) == (("config.json",), (2,))

        def read(**changes):
            fields = {"kind": "export", "name": "model", "path": "config.json"}
            return ReadFile(**{**fields, "offset": 0, "length": 10, **changes})

        chunk = await talk.result("read_file", 2, read())
        assert (bytes(chunk.data), chunk.size) == (b"{}", 2)
        assert bytes((await talk.result("read_file", 3, read(offset=1))).data) == b"}"
        error = await talk.error("read_file", 4, read(path="../../secret"))
        assert type(error) is InvalidRequestError


@in_loop
async def test_a_run_without_a_directory_refuses_to_save():
    async with running() as talk:
        error = await talk.error("save", 1, Save(name="one"))
        assert "pass checkpoint_dir= to connect" in error.message
        assert (await talk.result("checkpoints", 2)).checkpoints == ()


@in_loop
async def test_versions_of_trainer_and_sampler_are_told_apart():
    async with running() as talk:
        await talk.step(1)
        version = await talk.result("version", 3)
        assert (version.trainer, version.sampler) == (1, 0)
        await talk.result("sync", 4, OPERATIONS["sync"].request(label=7))
        version = await talk.result("version", 5)
        assert (version.trainer, version.sampler, version.label) == (1, 1, 7)
