"""Stock verl's `separate_async` trainer, started as users start it, against `remote-rl serve mock`.

A token takes the server 0.2 s, so that the longest responses are drawn while the trainer updates
and delivers weights.
"""

from __future__ import annotations

import math
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from verl_runs import Row, Trainings, connect_and_read, descendants, serve_mock
from verl_workload import VOCABULARY, asynchronous

STEPS = 4
STALENESS = "training/off_policy/trajectory_staleness"
STALENESS_WORST = "training/off_policy/trajectory_staleness_worst"
SPANS = "training/off_policy/trajectory_spans"

#: seconds; an update takes longer than a rollout needs to begin, and a rollout longer than a step
LATENCY = "{token = 0.2, forward_backward = 1.0}"

NIGHTLY = os.environ.get("REMOTE_RL_NIGHTLY") == "1"
nightly = pytest.mark.skipif(not NIGHTLY, reason="takes minutes: REMOTE_RL_NIGHTLY=1")


def serve(tmp_path: Path) -> Any:
    return serve_mock(tmp_path / "server", vocab_size=len(VOCABULARY), latency=LATENCY)


def check_steps(rows: list[Row], first: int = 1) -> None:
    """What every step of the training must show."""
    assert [row["step"] for row in rows] == list(range(first, first + len(rows)))
    for row in rows:
        data = row["data"]
        assert data["actor/grad_norm"] > 0
        assert data["actor/sequences"] == 8  # an update takes one mini-batch of 2 groups
        assert math.isfinite(data["actor/kl_loss"])
        assert 0 <= data["critic/score/mean"] <= 1
        # of one policy, or drawn across deliveries, but of none that came after the step began
        assert data[f"{STALENESS}/min"] >= 0
        assert 1 <= data[f"{SPANS}/max"] <= row["step"]
        assert data[f"{STALENESS_WORST}/max"] < row["step"]


def test_rollouts_go_on_while_the_policy_is_trained(train: Trainings, tmp_path: Path) -> None:
    with serve(tmp_path) as url:
        done, rows = train(
            url,
            *asynchronous(),
            "algorithm.rollout_correction.bypass_mode=true",
            "trainer.save_freq=-1",
            steps=STEPS,
        )
        assert done.returncode == 0, done.stdout[-8000:]
        check_steps(rows)
        # the warm-up's prompts and the first step's are of the first policy
        assert rows[0]["data"][f"{STALENESS_WORST}/max"] == 0
        # rollouts were begun before the delivery that the step trained on, and some went on across
        # one; not in every step, since those of the warm-up and of the first step end together
        assert max(row["data"][f"{STALENESS_WORST}/max"] for row in rows) >= 1
        assert max(row["data"][f"{SPANS}/max"] for row in rows) > 1
        # one delivery a step, after its two updates
        assert [row["data"]["weights/version"] for row in rows] == [2, 4, 6, 8]
        versions = connect_and_read(url)
        assert versions.label == STEPS
        assert versions.trainer == versions.sampler == 2 * STEPS


@nightly
def test_decoupled_with_ended_generations_saved_and_resumed(
    train: Trainings, tmp_path: Path
) -> None:
    options = (
        *asynchronous(),
        "+actor_rollout_ref.rollout.engine_kwargs.remote_rl.in_flight=abort",
        "algorithm.rollout_correction.rollout_is=token",
        "trainer.save_freq=3",
    )
    with serve(tmp_path) as url:
        done, rows = train(url, *options, steps=3)
        assert done.returncode == 0, done.stdout[-8000:]
        check_steps(rows)
        for row in rows:
            assert row["data"]["training/rollout_probs_diff_valid"] == 1
            assert math.isfinite(row["data"]["actor/entropy"])
            assert row["data"]["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=0.5)
        # the first step's rollouts are of the policy it began with, and so are the old logprobs
        # of both its updates, though the first of them has changed the policy
        assert rows[0]["data"]["training/rollout_probs_diff_max"] <= 1e-6
        assert max(row["data"][f"{SPANS}/max"] for row in rows) > 1
        assert connect_and_read(url).label == 3

        done, resumed = train(url, *options, "trainer.val_before_train=true", steps=5)
        assert done.returncode == 0, done.stdout[-8000:]
        assert [row["step"] for row in resumed] == [3, 4, 5]
        assert "val-core/letters/acc/mean@1" in resumed[0]["data"]
        check_steps(resumed[1:], first=4)
        # what was in flight when the training ended was begun again, so nothing is warmed up
        assert re.search(r"Restored \d+ training prompt groups", done.stdout)
        assert "Skipping async warmup" in done.stdout
        assert connect_and_read(url).label == 5


@nightly
def test_an_agent_loop_worker_that_dies_stops_the_training(
    train: Trainings, tmp_path: Path
) -> None:
    def kill(training: int) -> None:
        (worker,) = descendants(training, "ray::AgentLoopWorkerTQ")
        os.kill(worker, signal.SIGKILL)

    with serve(tmp_path) as url:
        # stock verl would wait for its rollouts without end
        done, rows = train(
            url, *asynchronous(), "trainer.save_freq=1", steps=1000, after_a_step=kill
        )
        assert done.returncode != 0
        assert rows
        # verl itself names it where it died as prompts were handed to it, else the shim does
        assert "class_name: AgentLoopWorkerTQ" in done.stdout
        versions = connect_and_read(url)  # the run was given back
        assert versions.trainer == versions.sampler
