"""The older verl that the shim serves: REMOTE_RL_OLDER_VERL is the version that is to be installed;
without it, nothing here runs. `nox -s verl-0.9.0` installs it and sets the variable."""

from __future__ import annotations

import importlib.metadata
import math
import os
from pathlib import Path

import pytest
from verl_runs import Trainings, connect_and_read, serve_mock
from verl_workload import VOCABULARY, asynchronous

VERSION = os.environ.get("REMOTE_RL_OLDER_VERL")
pytestmark = pytest.mark.skipif(
    not VERSION, reason="REMOTE_RL_OLDER_VERL names no version: nox -s verl-0.9.0"
)


def test_two_synchronous_steps(train: Trainings, tmp_path: Path) -> None:
    assert importlib.metadata.version("verl") == VERSION
    with serve_mock(tmp_path / "server", vocab_size=len(VOCABULARY)) as url:
        done, rows = train(url, steps=2)
        assert done.returncode == 0, done.stdout[-8000:]
        assert [row["step"] for row in rows] == [1, 2]
        for row in rows:
            data = row["data"]
            assert data["training/rollout_probs_diff_max"] <= 1e-6
            assert data["actor/grad_norm"] > 0
            assert data["actor/sequences"] == 8
            assert math.isfinite(data["actor/pg_loss"])
        versions = connect_and_read(url)
        assert versions.label == 2
        assert versions.trainer == versions.sampler == 4  # two mini-batches a step


def test_the_asynchronous_mode_is_refused(train: Trainings, tmp_path: Path) -> None:
    assert importlib.metadata.version("verl") == VERSION
    with serve_mock(tmp_path / "server", vocab_size=len(VOCABULARY)) as url:
        done, rows = train(url, *asynchronous(), steps=2)
        assert done.returncode != 0
        assert rows == []
        assert "needs verl 0.9.1" in done.stdout
        assert connect_and_read(url).trainer == 0
