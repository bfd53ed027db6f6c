"""What a training says that has lost its run, whichever process noticed it first."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from remote_rl import errors
from shims.common.checkpoints import MANIFEST
from shims.verl import failures
from shims.verl.lost import run_lost, what_happened
from shims.verl.trainer import RemoteTrainer

#: as a session says it that has seen no checkpoint
GONE = errors.UnreachableError(
    "nothing listens at http://127.0.0.1:7700 any more: its server has ended, and the run with it; "
    "start it again and connect with start='base' (this client saw no checkpoint)"
)
NAME = "verl-global_step_3-0123456789ab"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A training's folder after its third step was saved, as verl and the shim leave it."""
    folder = tmp_path / "global_step_3" / "actor"
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text(json.dumps({"format": 1, "checkpoint": NAME, "global_step": 3}))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    return tmp_path


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """verl's queue, as far as failures are noted in it."""
    noted: dict[str, dict[str, Any]] = {}

    async def put(key: str, partition_id: str, tag: dict[str, Any]) -> None:
        noted[key] = tag

    listed = {"remote_rl_failures": noted}
    monkeypatch.setattr(failures.transfer_queue, "async_kv_put", put)
    monkeypatch.setattr(failures.transfer_queue, "kv_list", lambda partition_id: listed)
    return noted


def wrapped(error: Exception) -> Exception:
    """The error as Ray raises it where a worker's call is waited for."""
    found = ray.exceptions.RayTaskError("update_actor", "its traceback", error)
    raised = found.as_instanceof_cause()
    assert isinstance(raised, type(error))
    return raised


@pytest.mark.parametrize("noticed", [GONE, wrapped(GONE)], ids=["here", "in a worker"])
def test_it_says_where_verl_goes_on(
    config: Callable[..., Any], saved: Path, noticed: Exception
) -> None:
    error = run_lost(config(f"trainer.default_local_dir={saved}"), noticed)
    assert error.details == {"last_checkpoint": NAME}
    assert "nothing listens at http://127.0.0.1:7700 any more" in str(error)
    assert f"trainer.resume_mode=auto: it goes on from {saved / 'global_step_3'}" in str(error)
    assert NAME in str(error)
    assert "start='base'" not in str(error)


def test_before_the_first_checkpoint_it_says_so(config: Callable[..., Any], tmp_path: Path) -> None:
    error = run_lost(config(f"trainer.default_local_dir={tmp_path}"), GONE)
    assert error.details == {"last_checkpoint": None}
    assert "before its first checkpoint was saved" in str(error)


def test_an_agent_loop_that_noticed_it_first_is_no_failed_generation(
    notes: dict[str, dict[str, Any]],
) -> None:
    asyncio.run(failures.report(errors.BackendError("worker 2 died")))
    with pytest.raises(errors.BackendError, match="1 of the generations"):
        failures.raise_reported()
    asyncio.run(failures.report(GONE))
    with pytest.raises(errors.RunLostError) as raised:
        failures.raise_reported()
    assert str(raised.value) == what_happened(GONE)


def test_a_training_ends_with_it(
    config: Callable[..., Any],
    saved: Path,
    notes: dict[str, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fit(self: Any, manager: Any) -> None:
        asyncio.run(failures.report(GONE))
        raise RuntimeError("verl has nothing to train on")

    monkeypatch.setattr(PPOTrainerSync, "fit", fit)
    trainer = object.__new__(RemoteTrainer)
    trainer.config = config(f"trainer.default_local_dir={saved}")
    left: list[BaseException | None] = []
    trainer._driver, trainer._watch = Leaving(left), Watched()
    trainer.reward_loop_manager = Watched()
    with pytest.raises(errors.RunLostError, match=NAME):
        trainer.fit(None)
    assert [type(each) for each in left] == [errors.RunLostError]


class Leaving:
    """The driver's session: what it was left with."""

    def __init__(self, left: list[BaseException | None]) -> None:
        self._left = left

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._left.append(error)


class Watched:
    """Nothing that could die."""

    reward_loop_worker_handles = None

    def over(self, what: str, actors: Any) -> None: ...
