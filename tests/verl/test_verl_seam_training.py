"""Three GRPO steps and a resume through the RemoteBackend seam, on Ray, against a served mock.

The trainer is the tests' own (`seam/`), since no verl on PyPI has one; worker group, replica
registry, advantages and metrics are the installed verl's.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import verl_with_seam
from verl_runs import connect_and_read, serve_mock
from verl_workload import VOCABULARY, build_inputs

from shims.common.checkpoints import MANIFEST

#: two mini-batches of two prompts each would need four prompts; the seam's run has two
_SIZES = ("actor_rollout_ref.actor.ppo_mini_batch_size=1", "trainer.max_actor_ckpt_to_keep=2")

Run = dict[str, Any]


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Run]:
    """Trains up to a step in a process of its own, with the same folders each time."""
    build_inputs(tmp_path)

    def run(url: str, steps: int, *, trainer: str, without_v1: bool) -> Run:
        script = Path(__file__).with_name("run_seam.py")
        done = subprocess.run(
            [sys.executable, str(script), str(tmp_path), url, str(steps), trainer, *_SIZES],
            env={
                **verl_with_seam.environment(without_v1=without_v1),
                "RAY_ADDRESS": "local",
                "HF_HUB_OFFLINE": "1",
            },
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
        found: Run = json.loads(done.stdout.splitlines()[-1])
        return found

    return run


def check_step(row: Run) -> None:
    """What every step shows."""
    assert 0 <= row["score"] <= 1
    assert row["rollout_probs_diff"] <= 1e-6
    assert row["actor/grad_norm"] > 0
    assert row["actor/sequences"] == 4  # of the 8 of a step, so two mini-batches
    assert row["actor/lr"] == pytest.approx(0.01)
    assert row["actor/kl_coef"] == 0.01
    assert math.isfinite(row["perf/mfu/actor"])
    assert row["entropy"] > 0


def test_three_steps_as_the_branch_drives_them_then_two_as_the_v1_trainer_does(
    train: Callable[..., Run], tmp_path: Path
) -> None:
    with serve_mock(tmp_path / "server", vocab_size=len(VOCABULARY)) as url:
        padded = train(url, 3, trainer="v0", without_v1=True)
        assert len(padded["rows"]) == 3
        for row in padded["rows"]:
            check_step(row)
            assert math.isfinite(row["infer_mfu"])
        # no module was needed that imports what came to verl after the seam
        assert not {"shims.verl.trainer", "shims.verl.llm_client"} & set(padded["modules"])
        # the trainer has left, its run is there at once, with what it trained and delivered
        versions = connect_and_read(url)
        assert versions.trainer == versions.sampler == 3 * 2
        assert versions.label == 3
        kept = [step for step in range(1, 4) if manifest(tmp_path, step).exists()]
        assert kept == [2, 3]

        jagged = train(url, 5, trainer="v1", without_v1=False)
        assert len(jagged["rows"]) == 2  # resumed at the third
        for row in jagged["rows"]:
            check_step(row)
        # the weights that were loaded had moved, the reference had not
        assert padded["rows"][0]["actor/kl_loss"] < jagged["rows"][0]["actor/kl_loss"]
        assert connect_and_read(url).label == 5


def manifest(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"global_step_{step}" / "actor" / MANIFEST
