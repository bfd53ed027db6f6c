"""Stock verl's trainers against `remote-rl serve arctic` on CPUs: real DeepSpeed, vLLM and Ray, on
a tiny model with random weights.

REMOTE_RL_ARCTIC_PYTHON is the interpreter of the server's environment; without it nothing here
runs. `nox -s verl-arctic` makes both environments and sets it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from arctic_server import MOVED, PYTHON, SAME, TRAINING_SECONDS, Traces, check_sampler, serving
from tiny_model import give_weights
from verl_runs import Row, Trainings, connect_and_read
from verl_workload import asynchronous, build_model_folder

pytestmark = pytest.mark.skipif(
    not PYTHON,
    reason="REMOTE_RL_ARCTIC_PYTHON names no interpreter of arctic's environment: "
    "nox -s verl-arctic",
)
STALENESS_WORST = "training/off_policy/trajectory_staleness_worst"
SPANS = "training/off_policy/trajectory_spans"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return give_weights(build_model_folder(tmp_path_factory.mktemp("model")), seed=0)


@pytest.fixture
def train(inputs: dict[str, Path], model: Path, tmp_path: Path) -> Iterator[Trainings]:
    trainings = Trainings({**inputs, "model": model}, tmp_path)
    yield trainings
    trainings.close()


def check_step(row: Row, sequences: int = 8) -> None:
    """What every logged step must show; `sequences`: of a mini-batch."""
    data = row["data"]
    assert 0 <= data["critic/score/mean"] <= 1
    assert data["training/rollout_probs_diff_valid"] == 1
    assert data["actor/grad_norm"] > 0
    assert data["actor/lr"] == pytest.approx(0.01)
    assert data["actor/sequences"] == sequences
    for name in ("pg_loss", "kl_loss", "entropy", "grad_norm"):
        assert math.isfinite(data[f"actor/{name}"]), name


def test_two_steps_then_resumed_by_another_server_for_a_third(
    train: Trainings, model: Path, tmp_path: Path
) -> None:
    traces = Traces()
    with serving(model, tmp_path / "server", traces) as url:
        done, rows = train(url, steps=2, after_a_step=traces.see, timeout=TRAINING_SECONDS)
        assert done.returncode == 0, done.stdout[-8000:]
        assert [row["step"] for row in rows] == [1, 2]
        for row in rows:
            check_step(row)
            # all on policy: the second step's rollouts are of the weights that the first made
            assert row["data"]["training/rollout_probs_diff_max"] <= SAME
            assert row["data"][f"{STALENESS_WORST}/max"] == 0
        versions = connect_and_read(url)
        assert versions.label == 2
        assert versions.trainer == versions.sampler == 4  # two mini-batches a step
        check_sampler(url)
    traces.are_gone()

    with serving(model, tmp_path / "server", traces) as url:
        # one mini-batch, so that its KL is that of the policy which was loaded
        options = ("trainer.save_freq=-1", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
        done, resumed = train(
            url, *options, steps=3, after_a_step=traces.see, timeout=TRAINING_SECONDS
        )
        assert done.returncode == 0, done.stdout[-8000:]
        assert [row["step"] for row in resumed] == [3]
        check_step(resumed[0], sequences=16)
        assert resumed[0]["data"]["training/rollout_probs_diff_max"] <= SAME
        # it had moved away from the reference, which is what the model's folder holds
        assert resumed[0]["data"]["actor/kl_loss"] > MOVED
        assert connect_and_read(url).label == 3
        check_sampler(url)
    traces.are_gone()


def test_rollouts_go_on_while_the_policy_is_trained(
    train: Trainings, model: Path, tmp_path: Path
) -> None:
    traces = Traces()
    options = ("algorithm.rollout_correction.rollout_is=token", "trainer.save_freq=-1")
    with serving(model, tmp_path / "server", traces) as url:
        done, rows = train(
            url,
            *asynchronous(),
            *options,
            steps=3,
            after_a_step=traces.see,
            timeout=TRAINING_SECONDS,
        )
        assert done.returncode == 0, done.stdout[-8000:]
        assert [row["step"] for row in rows] == [1, 2, 3]
        for row in rows:
            check_step(row)
            assert row["data"][f"{STALENESS_WORST}/max"] < row["step"]
            assert row["data"][f"{SPANS}/max"] >= 1
        # the first step's rollouts are of the policy that it began with
        assert rows[0]["data"][f"{STALENESS_WORST}/max"] == 0
        assert rows[0]["data"]["training/rollout_probs_diff_max"] <= SAME
        # two updates, then a delivery; for the second one's old logprobs the weights of before the
        # first are restored, and those of after it again, which are versions too
        assert [row["data"]["weights/version"] for row in rows] == [4, 8, 12]
        assert all(row["data"]["weights/bytes"] > 0 for row in rows)
        versions = connect_and_read(url)
        assert versions.label == 3
        assert versions.trainer == versions.sampler == 12
        check_sampler(url)
    traces.are_gone()
