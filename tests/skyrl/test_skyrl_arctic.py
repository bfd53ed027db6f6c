"""Stock SkyRL's synchronous trainer against `remote-rl serve arctic` on CPUs: real DeepSpeed, vLLM
and Ray, on a tiny model with random weights.

Without REMOTE_RL_ARCTIC_PYTHON nothing here runs; `nox -s skyrl-arctic` makes both environments.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from arctic_server import PYTHON, Traces, check_sampler, serving
from skyrl_runs import Trainings
from skyrl_workload import build_inputs, build_model_folder
from tiny_model import give_weights
from verl_runs import connect_and_read

pytestmark = pytest.mark.skipif(
    not PYTHON,
    reason="REMOTE_RL_ARCTIC_PYTHON names no interpreter of arctic's environment: "
    "nox -s skyrl-arctic",
)
STEPS = 2


def test_two_steps_of_two_turns_then_resumed_for_a_third(tmp_path: Path) -> None:
    traces = Traces()
    model = give_weights(build_model_folder(tmp_path / "served"), seed=0)
    train = Trainings({**build_inputs(tmp_path / "inputs"), "model": model}, tmp_path)
    options = (
        "environment.env_class=looking",
        "generator.max_turns=2",
        "generator.max_input_length=64",
        "generator.sampling_params.temperature=0.7",
        "trainer.policy.optimizer_config.lr=0.01",
        "trainer.ckpt_interval=1",
        "trainer.resume_mode=latest",
        "trainer.epochs=3",
    )
    with serving(model, tmp_path / "server", traces) as url:
        done, rows = train(url, *options, f"trainer.max_training_steps={STEPS}", data="looking")
        assert done.returncode == 0, done.stdout[-6000:]
        assert [row["step"] for row in rows] == [1, 2]
        for row in rows:
            data = row["data"]
            assert data["policy/grad_norm"] > 0
            for name in ("final_loss", "policy_loss", "policy_entropy", "policy_kl"):
                assert math.isfinite(data[f"policy/{name}"])
            # but for each response's first token, which SkyRL forbids to end it
            assert data["policy/rollout_train_logprobs_abs_diff_min"] <= 1e-4
        versions = connect_and_read(url)
        assert versions.label == STEPS
        assert versions.trainer == versions.sampler == 2 * STEPS
        check_sampler(url)
        # the same server goes on from what it saved
        last = f"trainer.max_training_steps={STEPS + 1}"
        done, resumed = train(url, *options, last, data="looking")
        assert done.returncode == 0, done.stdout[-6000:]
        assert [row["step"] for row in resumed] == [STEPS + 1]
        assert connect_and_read(url).label == STEPS + 1
        check_sampler(url)
    traces.are_gone()
