"""Stock verl's trainers against `remote-rl serve arctic` on CPUs: real DeepSpeed, vLLM and Ray, on
a tiny model with random weights.

REMOTE_RL_ARCTIC_PYTHON is the interpreter of the server's environment; without it nothing here
runs. `nox -s verl-arctic` makes both environments and sets it.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from verl_runs import Row, Server, Trainings, connect_and_read, descendants
from verl_workload import asynchronous, build_model_with_weights

from backends.arctic.leftovers import Owner, owner_of
from remote_rl import Batch, SamplingParams, connect
from remote_rl.errors import BackendError

PYTHON = os.environ.get("REMOTE_RL_ARCTIC_PYTHON")
pytestmark = pytest.mark.skipif(
    not PYTHON,
    reason="REMOTE_RL_ARCTIC_PYTHON names no interpreter of arctic's environment: "
    "nox -s verl-arctic",
)
STALENESS_WORST = "training/off_policy/trajectory_staleness_worst"
SPANS = "training/off_policy/trajectory_spans"
#: of the same token's probabilities by vLLM and by the trainer
SAME = 1e-4
#: what a policy's move does to them at the least, here
MOVED = 1e-2
#: Ray's processes end soon after who started them
PATIENCE = 60.0
#: until a server or a training that hangs is given up, also on a machine with much else to do
START_SECONDS, TRAINING_SECONDS = 900.0, 1800.0
SHARED_MEMORY = Path("/dev/shm")


class Traces:
    """What processes that were seen may not leave on the machine."""

    def __init__(self) -> None:
        self._seen: set[Owner] = set()

    def see(self, process_id: int) -> None:
        """This one, and all below it."""
        for each in (process_id, *descendants(process_id, "")):
            with contextlib.suppress(BackendError):  # it has ended meanwhile
                self._seen.add(owner_of(each))

    def left(self) -> list[str]:
        """Living processes, and names in shared memory."""
        found = [f"process {each.process}" for each in self._seen if _lives(each)]
        mine = [each.prefix for each in self._seen]
        for name in os.listdir(SHARED_MEMORY):
            if name.startswith(("deepspeed_", *mine)):
                found.append(str(SHARED_MEMORY / name))
        return found

    def are_gone(self) -> None:
        """Waits until nothing is left; says what is, if something stays."""
        assert self._seen
        begin = time.monotonic()
        while left := self.left():
            assert time.monotonic() - begin < PATIENCE, f"left after {PATIENCE:g} s: {left}"
            time.sleep(0.1)


def _lives(owner: Owner) -> bool:
    with contextlib.suppress(BackendError):
        return owner_of(owner.process) == owner
    return False


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_with_weights(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture
def train(inputs: dict[str, Path], model: Path, tmp_path: Path) -> Iterator[Trainings]:
    trainings = Trainings({**inputs, "model": model}, tmp_path)
    yield trainings
    trainings.close()


@contextlib.contextmanager
def serving(model: Path, folder: Path, traces: Traces) -> Iterator[str]:
    """A server of two ranks and a vLLM engine; its address. What it started is to be gone when it
    has ended."""
    assert PYTHON is not None
    assert Path(PYTHON).exists(), f"REMOTE_RL_ARCTIC_PYTHON={PYTHON} is not there"
    settings = f'model = "{model}"\n[training]\nranks = 2\n[placement]\ndevice = "cpu"\n'
    settings += f"start_timeout = {START_SECONDS}\n"
    server = Server("arctic", settings, folder, python=PYTHON)
    try:
        yield server.url
        traces.see(server.process_id)
    finally:
        server.stop()


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


def check_sampler(url: str) -> None:
    """vLLM draws from the policy that the trainer holds, which isn't the one it began with."""
    with connect(url, start="current") as session:
        sampling = SamplingParams(n=8, max_tokens=16, temperature=0.9, seed=5)
        groups = session.sampling.generate([[2, 3], [4, 3], [5, 2]], sampling).result()
        batch = Batch.from_groups(groups, advantages=[0.0] * 24)
        assert batch.sampling_logprobs is not None
        drawn = np.exp(batch.sampling_logprobs.values)
        trained, began = (
            np.exp(session.training.forward(batch, policy=each).result().logprobs.values)
            for each in ("current", "reference")
        )
    assert np.abs(drawn - trained).max() <= SAME
    assert np.abs(drawn - began).max() > MOVED


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
