"""Stock verl's synchronous trainer, started as users start it, against `remote-rl serve mock`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from verl_runs import Row, Trainings, connect_and_read, serve_mock
from verl_workload import VOCABULARY

from shims.common.checkpoints import MANIFEST

STEPS = 5


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
    for name in ("actor", "actor_infer"):  # of the peak that the server was told
        assert 0 < data[f"perf/mfu/{name}"] < 1
    assert data["perf/computed_tokens"] > 0
    tokens, seconds = data["perf/total_num_tokens"], data["perf/time_per_step"]
    assert data["perf/throughput"] == pytest.approx(tokens / seconds)  # of one device
    assert data["training/off_policy/trajectory_staleness/max"] == 0
    assert math.isfinite(data["actor/entropy"])


def test_five_steps_then_resumed_for_a_sixth(train: Trainings, tmp_path: Path) -> None:
    # a generation that fails once is tried again, and leaves no trace
    faults = '[{operation = "generate", call = 7}, {operation = "generate", call = 40}]'
    options = {"vocab_size": len(VOCABULARY), "faults": faults, "peak_flops": 1e14}
    with serve_mock(tmp_path / "server", **options) as url:
        done, rows = train(url, "trainer.max_actor_ckpt_to_keep=2", steps=STEPS)
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


def test_a_generation_that_fails_for_good_stops_the_training(
    train: Trainings, tmp_path: Path
) -> None:
    # stock verl would train on with 15 of the 16 rollouts, and exit with 0
    faults = '[{operation = "generate", call = 3}]'
    with serve_mock(tmp_path / "server", vocab_size=len(VOCABULARY), faults=faults) as url:
        options = "actor_rollout_ref.rollout.engine_kwargs.remote_rl"
        done, rows = train(url, f"+{options}.generation_attempts=1", steps=STEPS)
        assert done.returncode != 0
        assert rows == []
        assert "1 of the generations failed for good" in done.stdout
        assert connect_and_read(url).trainer == 0
