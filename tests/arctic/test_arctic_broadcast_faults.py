"""Deliveries by broadcast on real ranks and vLLM, over gloo: what they deliver, and what becomes of
them where one side refuses, dies or hangs in the middle."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from arctic_faults import (
    NIGHTLY,
    PATIENCE,
    PROMPTS,
    Trained,
    drawn,
    state,
    train,
    until,
    within,
)
from arctic_models import write_model
from broadcasting import Fault, Stopping, stands_still

from backends.arctic.config import ArcticConfig
from remote_rl import Batch, SamplingParams, Session, connect
from remote_rl.errors import BackendError

nightly = pytest.mark.skipif(not NIGHTLY, reason="takes long: REMOTE_RL_NIGHTLY=1")

#: what hangs is ended after it; much more than a loaded machine needs for a piece
HANGS_SECONDS = 15.0


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Fault:
    return Fault(tmp_path_factory.mktemp("fault") / "next")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, fault: Fault) -> Iterator[Trained]:
    root = tmp_path_factory.mktemp("broadcast")
    config = ArcticConfig(
        model=write_model(root / "model", "qwen3", head_dim=32),
        training={"ranks": 2, "zero_stage": 3},
        sampling={"engines": 2},
        weights={"path": "gloo", "patience": HANGS_SECONDS},
        placement={"device": "cpu"},
    )
    with connect(Stopping(config, fault.file), checkpoint_dir=root / "run") as session:
        trained = Trained(session, root / "run")
        yield trained
        traces = trained.processes.traces()
    assert traces.left() == []


def the_sampler_has_the_trainer_s_weights(session: Session) -> None:
    """Both give the samples the same logprobs; every engine draws some of them."""
    params = SamplingParams(n=4, max_tokens=12, temperature=1.0, seed=5)
    groups = session.sampling.generate(PROMPTS, params).result(PATIENCE)
    batch = Batch.from_groups(groups, advantages=[0.0] * 8)
    expected = session.training.forward(batch).result(PATIENCE).logprobs.values
    assert batch.sampling_logprobs is not None
    np.testing.assert_allclose(batch.sampling_logprobs.values, expected, atol=1e-4)


def test_every_sync_delivers(trained: Trained) -> None:
    session = trained.session
    for in_flight in ("keep", "wait", "abort"):
        train(session, 4)
        flying = session.sampling.generate(PROMPTS, SamplingParams(n=4, max_tokens=200, seed=1))
        receipt = session.weights.sync(in_flight=in_flight, label=in_flight).result(PATIENCE)
        assert receipt.label == in_flight
        assert receipt.source_fingerprint == receipt.sampler_fingerprint
        the_sampler_has_the_trainer_s_weights(session)
        flying.result(PATIENCE)
    trained.goes_on()


def test_an_engine_that_refuses_costs_neither_the_run_nor_much_time(
    trained: Trained, fault: Fault
) -> None:
    """Rank 0 waits for that engine, and must be told that it does not come."""
    session = trained.session
    trained.all_serve()
    before = state(session)
    fault.is_to_be("refusal")
    with within(HANGS_SECONDS - 5), pytest.raises(BackendError, match="does not want") as caught:
        session.weights.sync(label="never").result(PATIENCE)
    assert caught.value.details["worker"] == "sampling engine 1"
    assert session.weights.version().result().sampler is None
    with pytest.raises(BackendError, match=r"failed half-way; call weights\.sync"):
        drawn(session)
    assert state(session) == before
    session.weights.sync(label="mended").result(PATIENCE)
    assert session.weights.version().result().label == "mended"
    the_sampler_has_the_trainer_s_weights(session)


def test_an_engine_that_is_killed_in_the_middle(trained: Trained, fault: Fault) -> None:
    session, processes = trained.session, trained.processes
    trained.all_serve()
    before = state(session)
    fault.is_to_be("engine 0")
    operation = session.weights.sync(label="survived")
    until("the broadcast has begun", fault.has_come)
    (victim,) = (each for each in processes.samplers if stands_still(each))
    victim.kill()
    with within(15):
        receipt = operation.result(PATIENCE)  # the other one has them
    assert receipt.label == "survived"
    assert state(session) == before
    the_sampler_has_the_trainer_s_weights(session)
    trained.all_serve()
    the_sampler_has_the_trainer_s_weights(session)


def test_rank_0_is_killed_in_the_middle(trained: Trained, fault: Fault) -> None:
    session, processes = trained.session, trained.processes
    trained.all_serve()
    engines = {each.pid for each in processes.samplers}
    fault.is_to_be("rank 0")
    operation = session.weights.sync(label="never")
    until("the broadcast has begun", fault.has_come)
    (victim,) = (each for each in processes.ranks if stands_still(each))
    victim.kill()
    with within(15), pytest.raises(BackendError, match=r"rank 0 died .* in broadcast"):
        operation.result(PATIENCE)
    assert session.weights.version().result().sampler is None
    assert {each.pid for each in processes.samplers} == engines  # they heard of it, and live on
    trained.goes_on()


@nightly
@pytest.mark.parametrize("who", ["rank 0", "rank 1"])
def test_ranks_that_hang_are_ended(trained: Trained, fault: Fault, who: str) -> None:
    session = trained.session
    trained.all_serve()
    fault.is_to_be(who)
    with within(3 * HANGS_SECONDS), pytest.raises(BackendError, match="ranks did nothing for"):
        session.weights.sync(label="never").result(PATIENCE)
    trained.goes_on()


@nightly
def test_an_engine_that_hangs_is_ended(trained: Trained, fault: Fault) -> None:
    session = trained.session
    trained.all_serve()
    before = state(session)
    fault.is_to_be("engine 1")
    with within(3 * HANGS_SECONDS):
        receipt = session.weights.sync(label="survived").result(PATIENCE)
    assert receipt.label == "survived"
    assert state(session) == before
    the_sampler_has_the_trainer_s_weights(session)
    trained.all_serve()


@nightly
def test_an_engine_that_hangs_before_a_broadcast_is_ended(trained: Trained) -> None:
    session = trained.session
    trained.all_serve()
    trained.processes.samplers[0].suspend()
    with within(3 * HANGS_SECONDS):
        assert session.weights.sync(label="survived").result(PATIENCE).label == "survived"
    the_sampler_has_the_trainer_s_weights(session)
    trained.all_serve()
