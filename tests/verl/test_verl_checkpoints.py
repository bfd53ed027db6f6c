"""verl's checkpoint folders: a manifest each, and verl's own rule of which to keep."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remote_rl import Session, connect, errors
from shims.common.checkpoints import MANIFEST
from shims.verl.checkpoints import Checkpoints

SCHEDULE = {"last_epoch": 3, "_last_lr": [0.05]}
EVERYTHING = ("model", "optimizer", "extra")


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with connect("mock", checkpoint_dir=tmp_path / "server") as held:
        yield held


@pytest.fixture
def checkpoints(session: Session) -> Callable[..., Checkpoints]:
    """By verl's save_contents and load_contents."""
    return lambda save=EVERYTHING, load=EVERYTHING: Checkpoints(
        session, SimpleNamespace(save_contents=save, load_contents=load)
    )


def names(session: Session) -> list[str]:
    return [info.name for info in session.training.checkpoints().result()]


def actor_folder(tmp_path: Path, step: int) -> str:
    return str(tmp_path / "verl" / f"global_step_{step}" / "actor")


def test_a_saved_checkpoint_comes_back(
    session: Session, checkpoints: Callable[..., Checkpoints], tmp_path: Path
) -> None:
    folder = actor_folder(tmp_path, 3)
    name = checkpoints().save(folder, 3, None, SCHEDULE)
    manifest = json.loads((Path(folder) / MANIFEST).read_text())
    assert manifest == {"format": 1, "checkpoint": name, "global_step": 3}
    assert names(session) == [name]
    before = session.weights.version().result().trainer
    assert checkpoints().load(folder) == SCHEDULE
    assert session.weights.version().result().trainer > before


def test_old_ones_go_by_verls_rule(
    session: Session, checkpoints: Callable[..., Checkpoints], tmp_path: Path
) -> None:
    held = checkpoints()
    saved = [held.save(actor_folder(tmp_path, step), step, 2, SCHEDULE) for step in range(1, 5)]
    assert names(session) == saved[2:]
    kept = [Path(actor_folder(tmp_path, step)).exists() for step in range(1, 5)]
    assert kept == [False, False, True, True]


def test_saving_a_step_again_replaces_it(
    session: Session, checkpoints: Callable[..., Checkpoints], tmp_path: Path
) -> None:
    folder = actor_folder(tmp_path, 3)
    first = checkpoints().save(folder, 3, None, SCHEDULE)
    second = checkpoints().save(folder, 3, None, SCHEDULE)
    assert first != second
    assert names(session) == [second]


@pytest.mark.parametrize(
    ("save", "load", "wanted"),
    [
        (EVERYTHING, ("model", "optimizer"), None),
        (("model", "optimizer"), EVERYTHING, None),
        (("model", "extra"), ("model", "extra"), SCHEDULE),
    ],
)
def test_contents(
    checkpoints: Callable[..., Checkpoints], tmp_path: Path, save: Any, load: Any, wanted: Any
) -> None:
    folder = actor_folder(tmp_path, 1)
    checkpoints(save, load).save(folder, 1, None, SCHEDULE)
    assert checkpoints(save, load).load(folder) == wanted


def test_an_optimizer_that_was_not_saved_can_not_be_loaded(
    checkpoints: Callable[..., Checkpoints], tmp_path: Path
) -> None:
    folder = actor_folder(tmp_path, 1)
    checkpoints(("model",)).save(folder, 1, None, SCHEDULE)
    with pytest.raises(errors.RemoteRLError, match="optimizer"):
        checkpoints().load(folder)


def test_a_folder_of_another_trainer_is_refused(
    checkpoints: Callable[..., Checkpoints], tmp_path: Path
) -> None:
    with pytest.raises(errors.InvalidRequestError, match=r"remote_rl\.json"):
        checkpoints().load(str(tmp_path))
