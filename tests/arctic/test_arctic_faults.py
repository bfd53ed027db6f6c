"""Processes of a running engine are killed, or lack something: the operation that runs says who it
was, one call goes on from the last checkpoint, and nothing is left behind."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator

import pytest
from arctic_faults import (
    LARGE,
    LONG,
    NIGHTLY,
    PATIENCE,
    PROMPTS,
    Trained,
    drawn,
    limited,
    start,
    state,
    train,
    until,
    within,
)
from arctic_models import write_model

from remote_rl import losses
from remote_rl.errors import BackendError, InvalidRequestError

nightly = pytest.mark.skipif(not NIGHTLY, reason="takes long: REMOTE_RL_NIGHTLY=1")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    root = tmp_path_factory.mktemp("faults")
    model = write_model(root / "model", "qwen3", head_dim=32)
    with start(model, root / "run") as session:
        trained = Trained(session, root / "run")
        yield trained
        traces = trained.processes.traces()
    assert traces.left() == []


def in_the_middle() -> None:
    """Of what takes seconds. A fault a little earlier or later is as good a test."""
    time.sleep(0.5)


# -- checkpoints --------------------------------------------------------------------------------


def test_a_loop_keeps_its_last_two_checkpoints(trained: Trained) -> None:
    """What retention is made of: the list is in order, a deleted one is gone from the disk and can
    be neither loaded nor deleted again, and those that are kept are whole."""
    training = trained.session.training
    states: dict[str, bytes] = {}
    for step in range(4):
        name = f"step-{step}"
        train(trained.session, 10 + step)
        training.save(name, metadata={"step": step}, optimizer=step % 2 == 1).result(PATIENCE)
        states[name] = state(trained.session)
        own = [each.name for each in training.checkpoints().result() if each.name in states]
        for old in own[:-2]:
            training.delete(old).result()
            assert trained.files_of(old) == []
    held = [each for each in training.checkpoints().result() if each.name in states]
    assert [each.name for each in held] == ["step-2", "step-3"]
    assert [each.metadata for each in held] == [{"step": 2}, {"step": 3}]
    assert [each.optimizer for each in held] == [False, True]
    for each in held:
        assert trained.files_of(each.name)
    for gone in (training.load("step-0"), training.delete("step-1")):
        with pytest.raises(InvalidRequestError, match=r"no checkpoint .step-"):
            gone.result(PATIENCE)
    for each in held:
        training.load(each.name, optimizer=each.optimizer).result(PATIENCE)
        assert state(trained.session) == states[each.name]
        training.delete(each.name).result()
    train(trained.session, 20)
    training.save("step-0").result(PATIENCE)  # a name is free again
    training.delete("step-0").result()
    assert [each.name for each in training.checkpoints().result()] == ["one"]
    trained.goes_on()


# -- ranks ------------------------------------------------------------------------------------


def test_a_rank_that_is_killed_in_forward_backward(trained: Trained) -> None:
    operation = trained.session.training.forward_backward(LARGE, losses.PPO())
    in_the_middle()
    victim = trained.processes.ranks[1]
    victim.kill()
    with within(15), pytest.raises(BackendError, match=r"rank \d died .* forward_back") as caught:
        operation.result(PATIENCE)
    assert caught.value.details["worker"].startswith("rank ")
    assert f"pid: {victim.pid}" in caught.value.details["traceback"]
    until("the other rank has ended, too", lambda: not trained.processes.ranks)
    trained.goes_on()


@nightly
@pytest.mark.parametrize("noticed", [True, False])
def test_a_rank_that_is_killed_while_nothing_runs(trained: Trained, noticed: bool) -> None:
    trained.processes.ranks[0].kill()
    if noticed:
        with within(15), pytest.raises(BackendError, match=r"rank \d died .* in zero_grad"):
            trained.session.training.zero_grad().result(PATIENCE)
    trained.goes_on()


def test_a_rank_without_memory_while_the_other_waits_for_it(trained: Trained) -> None:
    victim = trained.processes.ranks[1]
    used = victim.memory_info().vms
    with limited(victim, resource.RLIMIT_AS, used + (16 << 20)):
        operation = trained.session.training.forward_backward(LARGE, losses.PPO())
        with within(15 + 10), pytest.raises(BackendError, match=r"alloc|Memory|died") as caught:
            operation.result(PATIENCE)
    assert caught.value.details["worker"].startswith("rank ")
    assert "rank.py" in caught.value.details["traceback"] or "died" in str(caught.value)
    trained.goes_on()


# -- sampling engines -------------------------------------------------------------------------


def test_samples_of_an_engine_that_is_killed_are_drawn_by_another(trained: Trained) -> None:
    session = trained.session
    trained.all_serve()
    operation = session.sampling.generate(PROMPTS, LONG)
    in_the_middle()
    trained.processes.samplers[0].kill()
    groups = operation.result(PATIENCE)
    assert [each.tokens.tolist() for group in groups for each in group] == trained.samples
    assert session.weights.version().result().sampler is not None


def test_an_abort_holds_though_an_engine_is_killed_before_it_takes_it(trained: Trained) -> None:
    session = trained.session
    trained.all_serve()
    victim = trained.processes.samplers[0]
    operation = session.sampling.generate(PROMPTS, LONG)
    in_the_middle()
    victim.suspend()
    aborting = session.sampling.abort()
    in_the_middle()
    victim.kill()
    aborting.result(PATIENCE)
    samples = [each for group in operation.result(PATIENCE) for each in group]
    assert any(not len(each) and each.finish_reason == "abort" for each in samples)
    for each, whole in zip(samples, trained.samples, strict=True):
        assert each.finish_reason == "abort" or each.tokens.tolist() == whole


def test_without_an_engine_that_has_the_weights_a_generate_says_so(trained: Trained) -> None:
    """Also one that is held, since a pause outlives the engines; sync waits for one of them."""
    session = trained.session
    session.weights.sync().result(PATIENCE)
    session.sampling.pause().result()
    held = session.sampling.generate(PROMPTS, LONG)
    for each in trained.processes.samplers:
        each.kill()
    with within(15), pytest.raises(BackendError, match=r"engine \d has died.* weights.sync") as one:
        held.result(PATIENCE)
    assert one.value.details["worker"].startswith("sampling engine ")
    assert session.weights.version().result().sampler is None
    session.weights.sync().result(PATIENCE)
    again = session.sampling.generate(PROMPTS, LONG)
    session.training.zero_grad().result()
    assert not again.done()
    session.sampling.resume().result()
    groups = again.result(PATIENCE)
    assert [each.tokens.tolist() for group in groups for each in group] == trained.samples


def test_a_delivery_that_one_engine_takes_and_one_does_not(trained: Trained) -> None:
    session, processes = trained.session, trained.processes
    trained.all_serve()
    victim = processes.samplers[0]
    with limited(victim, resource.RLIMIT_NOFILE, 0), pytest.raises(BackendError) as caught:
        session.weights.sync(label="never").result(PATIENCE)
    assert caught.value.details["worker"].startswith("sampling engine ")
    assert "Too many open files" in str(caught.value)
    assert session.weights.version().result().sampler is None
    with pytest.raises(BackendError, match=r"failed half-way; call weights\.sync"):
        drawn(session)
    assert processes.traces().segments() == []
    session.weights.sync(label="mended").result(PATIENCE)
    assert session.weights.version().result().label == "mended"
    assert drawn(session) == trained.samples


def test_an_engine_that_is_killed_in_a_delivery(trained: Trained) -> None:
    session, processes = trained.session, trained.processes
    trained.all_serve()
    victim = processes.samplers[0]
    victim.suspend()
    operation = session.weights.sync(label="survived")
    until("the weights are on their way", lambda: processes.traces().segments())
    in_the_middle()
    victim.kill()
    with within(15):
        receipt = operation.result(PATIENCE)  # the other one has them
    assert receipt.label == "survived"
    assert processes.traces().segments() == []
    assert drawn(session) == trained.samples


# -- what holds them --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("raylet", "this machine's raylet of the Ray cluster is gone"),
        pytest.param("gcs_server", "the head of the Ray cluster is gone", marks=nightly),
    ],
)
def test_ray_itself_is_killed(trained: Trained, name: str, told: str) -> None:
    session, traces = trained.session, trained.processes.traces()
    operations = [
        session.training.forward_backward(LARGE, losses.PPO()),
        session.sampling.generate(PROMPTS, LONG),
    ]
    in_the_middle()
    (victim,) = trained.processes.named(name)
    victim.kill()
    with within(15):
        for each in operations:
            with pytest.raises(BackendError, match=told) as caught:
                each.result(PATIENCE)
            assert caught.value.details["worker"] == "engine"
    assert traces.left() == []
    trained.goes_on()


@pytest.mark.parametrize("where", ["save", pytest.param("sync", marks=nightly)])
def test_the_engines_own_process_is_killed(trained: Trained, where: str) -> None:
    session, traces = trained.session, trained.processes.traces()
    stopped = trained.processes.ranks[1] if where == "save" else trained.processes.samplers[0]
    stopped.suspend()
    operation = session.training.save("never") if where == "save" else session.weights.sync()
    underway = traces.segments if where == "sync" else trained.unfinished
    until(f"the {where} is under way", underway)
    trained.processes.host.kill()
    with within(15), pytest.raises(BackendError, match=r"process is gone .*SIGKILL") as caught:
        operation.result(PATIENCE)
    assert caught.value.details["worker"] == "engine"
    assert traces.left() == []
    assert [each.name for each in session.training.checkpoints().result()] == ["one"]
    trained.goes_on()
