"""Halves that make room for each other, whole: sessions on real ranks and vLLM. A CPU shows who is
awake when, and that nothing is lost; not where the memory lies."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from arctic_faults import (
    LARGE,
    LONG,
    PATIENCE,
    PROMPTS,
    Processes,
    state,
    train,
    until,
)
from arctic_models import write_model
from sampler_tokenizers import byte_level
from swapping import Moves, Swapping

from backends.arctic.config import ArcticConfig
from backends.arctic.halves import placing_of
from backends.arctic.placing import Level
from remote_rl import SamplingParams, Session, connect, losses
from remote_rl.errors import BackendError
from remote_rl.testing.conformance.runner import Target, run

#: of the conformance suite, those that halves could spoil; all at night
AREAS = () if os.environ.get("REMOTE_RL_NIGHTLY") else ("Control", "Delivery")


def drawn(session: Session) -> list[list[int]]:
    """The tokens of some samples."""
    params = SamplingParams(n=2, max_tokens=100, temperature=1.0, seed=3)
    groups = session.sampling.generate(PROMPTS, params).result(PATIENCE)
    return [sample.tokens.tolist() for group in groups for sample in group]


class Half:
    """Counts what is done to it."""

    def __init__(self) -> None:
        self.moves: list[str] = []

    async def sleep(self) -> None:
        self.moves.append("sleep")

    async def wake(self, level: Level) -> None:
        self.moves.append(level.name)


def moved(config: ArcticConfig) -> list[list[str]]:
    """What trainer and sampler did in an operation of the trainer, a sleep, and a generate."""
    training, sampling = Half(), Half()

    async def script() -> None:
        placing = placing_of(config, training, sampling)
        async with placing.hold("training", told=print):
            pass
        for half in ("training", "sampling"):
            await placing.sleep(half)  # type: ignore[arg-type]
        await placing.draw(lambda: asyncio.sleep(0.3), print, asyncio.Event())
        await placing.wake("training", print)

    asyncio.run(script())
    return [training.moves, sampling.moves]


def test_who_makes_room_is_the_configuration_s(tmp_path: Path) -> None:
    def config(**placement: Any) -> ArcticConfig:
        return ArcticConfig(model=str(tmp_path), placement=placement)

    assert moved(config(device="cpu")) == [[], []]
    own = [["sleep", "AWAKE"], ["sleep", "AWAKE"]]
    assert moved(config(device="cuda")) == own
    assert moved(config(device="cuda", colocated=True, swap=False)) == own
    assert moved(config(device="cuda", colocated=True)) == [
        ["sleep", "AWAKE"],
        ["sleep", "AWAKE", "sleep"],
    ]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    root = tmp_path_factory.mktemp("swapping")
    model = write_model(root / "model", "qwen3", head_dim=32)
    byte_level().save_pretrained(model)
    config = ArcticConfig(
        model=str(model), training={"ranks": 2, "zero_stage": 2}, placement={"device": "cpu"}
    )
    with connect(Swapping(config), checkpoint_dir=root / "run") as session:
        yield session


@pytest.fixture
def moves(session: Session) -> Iterator[Moves]:
    """Of one test, which begins with base weights on both halves."""
    session.reset().result(PATIENCE)
    handler, logger = Moves(), logging.getLogger("remote_rl.arctic")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)


def test_a_loop_wakes_each_half_once_a_step(session: Session, moves: Moves) -> None:
    before = drawn(session)
    moves.made.clear()
    train(session, 0)
    session.weights.sync().result(PATIENCE)
    assert drawn(session) != before
    assert moves.made == [
        "sampling ASLEEP",
        "training AWAKE",
        "sampling WEIGHTS",
        "training ASLEEP",
        "sampling AWAKE",
    ]


def test_a_generate_makes_way_for_training_and_gives_the_same(
    session: Session, moves: Moves
) -> None:
    alone = session.sampling.generate(PROMPTS, LONG).result(PATIENCE)
    generate = session.sampling.generate(PROMPTS, LONG)
    session.training.forward_backward(LARGE, losses.PPO()).result(PATIENCE)
    assert not generate.done()
    session.training.zero_grad().result(PATIENCE)
    for group, other in zip(generate.result(PATIENCE), alone, strict=True):
        assert [each.tokens.tolist() for each in group] == [each.tokens.tolist() for each in other]
    assert moves.made[-2:] == ["training ASLEEP", "sampling AWAKE"]


def test_training_is_the_same_whatever_the_sampler_does_between(
    session: Session, moves: Moves
) -> None:
    train(session, 0)
    train(session, 1)
    expected = state(session)
    session.reset().result(PATIENCE)
    train(session, 0)
    drawn(session)
    session.training.forward_backward(LARGE, losses.PPO()).result(PATIENCE)
    drawn(session)
    session.training.zero_grad()
    train(session, 1)
    assert state(session) == expected


@pytest.mark.parametrize("in_flight", ["keep", "wait", "abort"])
def test_a_sync_finds_generates_that_made_way(
    session: Session, moves: Moves, in_flight: str
) -> None:
    generate = session.sampling.generate(PROMPTS, LONG)
    train(session, 0)
    version = session.weights.sync(in_flight=in_flight).result(PATIENCE).version  # type: ignore[arg-type]
    samples = [each for group in generate.result(PATIENCE) for each in group]
    assert (in_flight == "keep") == any(each.last_version == version for each in samples)
    assert (in_flight == "abort") == any(each.finish_reason == "abort" for each in samples)


def test_what_was_put_to_sleep_is_woken_by_what_needs_it(session: Session, moves: Moves) -> None:
    expected, weights = drawn(session), state(session)
    for half in ("sampling", "training"):
        session.sleep(half).result(PATIENCE)  # type: ignore[arg-type]
        assert f"{half} ASLEEP" in moves.made
        assert state(session) == weights
        assert drawn(session) == expected


def test_a_rank_that_dies_asleep_is_told_and_started_again(session: Session, moves: Moves) -> None:
    train(session, 0)
    session.training.save("one").result(PATIENCE)
    expected = state(session)
    drawn(session)
    until("the trainer sleeps", lambda: moves.made[-2:] == ["training ASLEEP", "sampling AWAKE"])
    Processes().ranks[0].kill()
    with pytest.raises(BackendError, match=r"rank \d died"):
        state(session)
    session.training.load("one").result(PATIENCE)
    assert state(session) == expected
    session.weights.sync().result(PATIENCE)
    drawn(session)


def test_the_contract_holds(session: Session) -> None:
    target = Target(session=session, tolerance=1e-4, learning_rate=1e-2)
    reports = run(target, areas=AREAS)
    assert {each.name: each.reason for each in reports if each.verdict == "failed"} == {}
    assert len([each for each in reports if each.verdict == "passed"]) > 15
