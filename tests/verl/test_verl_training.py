"""Stock verl, started as users start it, against `remote-rl serve mock` in another environment.

REMOTE_RL_SERVER_PYTHON is the other environment's interpreter; without it, this environment serves.
The shim is loaded by the entry point of the installed package.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from verl_workload import VOCABULARY, overrides

from remote_rl import connect
from shims.verl.checkpoints import MANIFEST

STEPS = 5

Row = dict[str, Any]


@contextmanager
def serve_mock(folder: Path, **options: Any) -> Iterator[str]:
    """A server of the mock; yields its address."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "mock.toml"
    settings.write_text("".join(f"{name} = {value}\n" for name, value in options.items()))
    python = os.environ.get("REMOTE_RL_SERVER_PYTHON") or sys.executable
    command = [str(Path(python).with_name("remote-rl")), "serve", "mock", "--port", "0"]
    command += ["--checkpoint-dir", str(folder / "checkpoints"), "--config", str(settings)]
    with (folder / "server.err").open("w") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        found = re.search(r"http://[^\s\"']+", line)
        assert found, f"the server said {line!r}: {(folder / 'server.err').read_text()}"
        yield found.group()
    finally:
        server.terminate()
        server.wait(timeout=30)
        server.stdout.close()


@pytest.fixture
def train(
    inputs: dict[str, Path], tmp_path: Path
) -> Iterator[Callable[..., tuple[subprocess.CompletedProcess[str], list[Row]]]]:
    """Runs `main_ppo` against an address: (process, one row of metrics a step).

    Ray keeps its files in a folder of its own, whose path is short enough for its sockets.
    """
    ray_folder = Path(tempfile.mkdtemp(prefix="rl", dir="/tmp"))

    def run(url: str, *more: str, steps: int = STEPS) -> Any:
        metrics = tmp_path / "metrics.jsonl"
        ray_init = ("address=local", f"_temp_dir={ray_folder}")
        arguments = [
            *overrides({**inputs, "checkpoints": tmp_path / "checkpoints"}, url, steps=steps),
            *(f"+ray_kwargs.ray_init.{each}" for each in ray_init),
            *more,
        ]
        environment = {
            **{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
            "VERL_FILE_LOGGER_PATH": str(metrics),
            "HF_HUB_OFFLINE": "1",
            "HYDRA_FULL_ERROR": "1",
        }
        metrics.unlink(missing_ok=True)
        done = subprocess.run(
            [sys.executable, "-m", "verl.trainer.main_ppo", *arguments],
            env=environment,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return done, [json.loads(line) for line in lines]

    yield run
    shutil.rmtree(ray_folder, ignore_errors=True)


def manifest(tmp_path: Path, step: int) -> Any:
    path = tmp_path / "checkpoints" / f"global_step_{step}" / "actor" / MANIFEST
    return json.loads(path.read_text()) if path.exists() else None


def check_step(row: Row) -> None:
    """What every logged step of the training must show."""
    data = row["data"]
    assert 0 <= data["critic/score/mean"] <= 1
    assert data["training/rollout_probs_diff_valid"] == 1
    assert data["training/rollout_probs_diff_max"] <= 1e-6
    assert data["actor/kl_coef"] == 0.01
    assert math.isfinite(data["actor/kl_loss"])
    assert data["actor/grad_norm"] > 0
    assert data["actor/lr"] == pytest.approx(0.01)
    assert data["actor/sequences"] == 8  # of the 16 of a step, so two mini-batches
    assert data["perf/mfu/actor"] == 0
    assert data["training/off_policy/trajectory_staleness/max"] == 0
    assert math.isfinite(data["actor/entropy"])


def test_five_steps_then_resumed_for_a_sixth(train: Callable[..., Any], tmp_path: Path) -> None:
    # a generation that fails once is tried again, and leaves no trace
    faults = '[{operation = "generate", call = 7}, {operation = "generate", call = 40}]'
    with serve_mock(tmp_path / "server", vocab_size=len(VOCABULARY), faults=faults) as url:
        done, rows = train(url, "trainer.max_actor_ckpt_to_keep=2")
        assert done.returncode == 0, done.stdout[-8000:]
        assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
        for row in rows:
            check_step(row)
        # on policy, the policy still is the reference; then it has moved away
        assert rows[0]["data"]["actor/kl_loss"] < rows[-1]["data"]["actor/kl_loss"]
        versions = connect_and_read(url)
        assert versions.label == 5
        assert versions.trainer == versions.sampler == 2 * STEPS
        assert [manifest(tmp_path, step) is not None for step in range(1, 6)] == [
            False,
            False,
            False,
            True,
            True,
        ]

        done, rows = train(
            url, "trainer.val_before_train=true", "trainer.save_freq=-1", steps=STEPS + 1
        )
        assert done.returncode == 0, done.stdout[-8000:]
        assert [row["step"] for row in rows] == [5, 6]
        assert "val-core/letters/acc/mean@1" in rows[0]["data"]
        check_step(rows[1])
        # the weights that were loaded had moved, the reference had not
        assert rows[1]["data"]["actor/kl_loss"] > 0


def connect_and_read(url: str) -> Any:
    """Versions that the server holds, read as a driver that changes nothing."""
    with connect(url, start="current") as session:
        return session.weights.version().result()


def test_a_generation_that_fails_for_good_stops_the_training(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    # stock verl would train on with 15 of the 16 rollouts, and exit with 0
    faults = '[{operation = "generate", call = 3}]'
    with serve_mock(tmp_path / "server", vocab_size=len(VOCABULARY), faults=faults) as url:
        options = "actor_rollout_ref.rollout.engine_kwargs.remote_rl"
        done, rows = train(url, f"+{options}.generation_attempts=1")
        assert done.returncode != 0
        assert rows == []
        assert "1 of the generations failed for good" in done.stdout
        assert connect_and_read(url).trainer == 0
