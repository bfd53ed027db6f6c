"""SIGKILL of a server in mid-run and in mid-save: what was saved before is whole, and a run that
resumes from it ends at the bits of one that was never interrupted."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from grpo_loop import contents, step, train
from process_support import NIGHTLY, SMALL, Playground, ServerProcess

from remote_rl import SamplingParams, Session, connect, errors

STEPS = 8
GONE = (errors.UnreachableError, errors.RunLostError)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, str], Path]:
    """What each step saw, and the folder of the checkpoints."""
    seen: dict[int, str] = {}
    folder = tmp_path_factory.mktemp("uninterrupted")
    with connect("mock", checkpoint_dir=folder, **SMALL) as rl:
        train(rl, 0, STEPS, seen)
    return seen, folder


def resumed(server: ServerProcess, last: str | None, seen: dict[int, str]) -> int:
    """Goes on to the end from what the error named; the version that the resume began at."""
    with connect(server.url, start=last or "base") as rl:
        listed = {info.name: info for info in rl.training.checkpoints().result()}
        first = 0 if last is None else listed[last].metadata["next"]
        version = rl.weights.version().result().trainer
        if last is not None:
            assert version > listed[last].version
            rl.weights.sync(label=first - 1).result()
        train(rl, first, STEPS, seen)
        return version


def facts(folder: Path, name: str) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads(
        (folder / "checkpoints" / name / "manifest.json").read_text()
    )
    return {key: manifest[key] for key in ("counters", "metadata", "optimizer", "reference")}


#: points of the run, and the last checkpoint before each
CRASHES = {
    "optim_step-5-after": "step-4",
    "save-2-half": "step-2",
    "place-2": "step-2",
}
MORE_CRASHES = {
    "forward_backward-1-before": None,
    "generate-4-before": "step-2",
    "optim_step-5-before": "step-4",
    "sync-6-after": "step-4",
    "save-1-after": None,
    "save-2-before": "step-2",
    "save-2-after": "step-2",
    "place-1": None,
}
if NIGHTLY:
    CRASHES = {**CRASHES, **MORE_CRASHES}


@pytest.mark.parametrize("point", CRASHES)
def test_a_crash_costs_what_came_after_the_last_checkpoint_and_nothing_else(
    point: str, playground: Playground, uninterrupted: tuple[dict[int, str], Path]
) -> None:
    expected, whole = uninterrupted
    seen: dict[int, str] = {}
    # of a short lease, a client gives a server up sooner; what is short is the wait alone
    server = playground.server("--lease", "1", backend="staged")
    playground.stage.hold(point)
    rl = connect(server.url)
    failed: list[BaseException] = []
    loop = threading.Thread(target=_train, args=(rl, seen, failed))
    loop.start()
    playground.stage.reached(point)
    server.kill()
    loop.join(60)
    rl.detach()
    assert isinstance(failed[0], errors.UnreachableError)
    last = failed[0].details["last_checkpoint"]
    assert last == CRASHES[point]
    in_a_save = point.startswith(("save", "place"))
    assert len(list(playground.checkpoints.glob(".partial*"))) == in_a_save

    again = playground.server()
    assert list(playground.checkpoints.glob(".partial*")) == []  # swept at the start
    kept = sorted(path.name for path in (playground.checkpoints / "checkpoints").glob("*"))
    assert kept == [f"step-{number}" for number in (2, 4) if f"step-{number}" <= (last or "")]
    resumed(again, last, seen)
    assert seen == expected
    for name in ("step-6", "step-8"):
        assert contents(playground.checkpoints, name) == contents(whole, name)
        assert facts(playground.checkpoints, name) == facts(whole, name)


def _train(rl: Session, seen: dict[int, str], failed: list[BaseException]) -> None:
    try:
        train(rl, 0, STEPS, seen)
    except errors.RemoteRLError as error:
        failed.append(error)


def test_without_the_resume_it_would_differ(
    uninterrupted: tuple[dict[int, str], Path], tmp_path: Path
) -> None:
    """What is compared above does depend on weights, optimizer, seeds and reference."""
    expected, whole = uninterrupted
    with connect("mock", checkpoint_dir=whole, **SMALL) as rl:
        rl.training.load("step-6", optimizer=False).result()
        rl.weights.sync(label=5).result()
        assert step(rl, 6) == expected[6]  # of the same weights and seeds
        assert step(rl, 7) != expected[7]  # and of another optimizer
    with connect("mock", checkpoint_dir=whole, **SMALL) as rl:
        rl.training.load("step-4").result()
        rl.weights.sync(label=3).result()
        rl.sampling.generate([[1]], SamplingParams(max_tokens=1)).result()
        assert step(rl, 4) != expected[4]  # one draw more, and all seeds are others


@pytest.mark.skipif(not NIGHTLY, reason="many servers, killed at random")
def test_kills_at_random_times_leave_only_whole_checkpoints(playground: Playground) -> None:
    """A loop that does nothing but save, killed anywhere in it, again and again."""
    random.seed(0)
    names: list[str] = []
    for turn in range(40):
        server = playground.server("--lease", "1")
        with connect(server.url) as rl:
            listed = [info.name for info in rl.training.checkpoints().result()]
            assert listed == names
            for name in listed[-3:]:
                rl.training.load(name).result()
        assert list(playground.checkpoints.glob(".partial*")) == []
        timer = threading.Timer(random.uniform(0.0, 0.4), server.process.kill)
        rl = connect(server.url, start="base")
        timer.start()
        told = []
        try:
            for number in range(1000):
                told.append(rl.training.save(f"{turn:03}-{number:04}").result().name)
        except GONE:
            pass
        rl.detach()
        server.kill()
        names += told
        # one that was placed just before its client could be told of it
        extra = sorted({path.name for path in (playground.checkpoints / "checkpoints").iterdir()})
        assert len(extra) - len(names) in (0, 1)
        names = extra
