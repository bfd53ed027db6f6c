"""While the trainer waits for rollouts it hears of failures and of processes that died; how often
it looks is said by the shim's options."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from remote_rl import errors
from shims.verl.options import POLL_SECONDS, Options
from shims.verl.trainer import RemoteAsyncTrainer, RemoteTrainer
from shims.verl.watch import Watch, between_looks, looking_every

OPTIONS = "actor_rollout_ref.rollout.engine_kwargs.remote_rl"


class OwnReplayBuffer(ReplayBuffer):
    """As a user's `custom_sampler`."""


def replay_buffer(kind: type[ReplayBuffer], **more: Any) -> Any:
    return kind(
        trainer_mode="any",
        trainer_config={},
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs={},
        **more,
    )


@pytest.mark.parametrize("kind", [ReplayBuffer, ReplayBufferAsync])
def test_the_replay_buffer_asks_before_it_waits_again(kind: type[ReplayBuffer]) -> None:
    asked: list[str] = []
    buffer = replay_buffer(kind, poll_interval=0.0)
    assert between_looks(buffer, lambda: asked.append("asked")) is buffer
    began = time.time()
    assert buffer._wait_for_next_poll("train", began) == began
    assert asked == ["asked"]


def test_what_is_raised_ends_the_waiting() -> None:
    def fail() -> None:
        raise errors.BackendError("a generation failed")

    class Buffer:
        def sample(self) -> None:
            while True:
                self._wait_for_next_poll("train", 0.0)

        def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
            raise AssertionError("waited on")

    with pytest.raises(errors.BackendError, match="a generation failed"):
        between_looks(Buffer(), fail).sample()


def test_a_replay_buffer_of_another_kind_is_left_alone() -> None:
    assert vars(between_looks(Watch(), lambda: None)) == vars(Watch())


@pytest.mark.parametrize("kind", [ReplayBuffer, ReplayBufferAsync])
def test_verls_own_replay_buffer_looks_more_often_than_stock(kind: type[ReplayBuffer]) -> None:
    stock = replay_buffer(kind).poll_interval
    assert looking_every(replay_buffer(kind), None).poll_interval == POLL_SECONDS < stock
    assert looking_every(replay_buffer(kind), stock).poll_interval == stock


def test_a_custom_sampler_keeps_its_own_unless_told() -> None:
    own = replay_buffer(OwnReplayBuffer, poll_interval=7.0)
    assert looking_every(own, None).poll_interval == 7.0
    assert looking_every(own, 0.5).poll_interval == 0.5


def test_a_replay_buffer_without_an_interval_is_refused_where_one_is_given() -> None:
    other: Any = object()
    assert looking_every(other, None) is other
    with pytest.raises(errors.UnsupportedError, match=r"remote_rl\.poll_seconds=0\.5 .* object,"):
        looking_every(other, 0.5)


@pytest.mark.parametrize(
    ("trainer", "kind"),
    [(RemoteTrainer, ReplayBuffer), (RemoteAsyncTrainer, ReplayBufferAsync)],
)
def test_the_trainers_build_it_as_the_options_say(
    config: Callable[..., Any], trainer: type[Any], kind: type[ReplayBuffer]
) -> None:
    stock_sampler = "trainer.v1.sampler.custom_sampler={path: null, name: null}"
    training = config(stock_sampler, f"{OPTIONS}.poll_seconds=0.75")
    built = trainer.__new__(trainer)  # what verl's __init__ sets needs the rest of a training
    built.config, built.trainer_mode = training, trainer.verl_mode
    built._options = Options.of(training.actor_rollout_ref.rollout)
    buffer = built._build_replay_buffer()
    assert (type(buffer), buffer.poll_interval) == (kind, 0.75)


_WATCHING = """
import sys
import time
import ray
from remote_rl import errors
from shims.verl.watch import Watch

@ray.remote(num_cpus=0)
class Worker:
    async def answer(self):
        return "alive"

ray.init(
    address="local",
    num_cpus=1,
    include_dashboard=False,
    log_to_driver=False,
    _temp_dir=sys.argv[1],
)
living, dying = Worker.remote(), Worker.remote()
print(*ray.get([living.answer.remote(), dying.answer.remote()]))
watch = Watch()
watch.over("an agent-loop worker", [living, dying])
watch.check()
ray.kill(dying)
until = time.monotonic() + 60
try:
    while time.monotonic() < until:
        watch.check()
except errors.BackendError as error:
    print(error)
watch = Watch()
watch.over("an agent-loop worker", [living])
watch.check()
print(ray.get(living.answer.remote()))
"""


def test_a_worker_that_dies_is_named(ray_folder: Path) -> None:
    # in a process of its own, whose end takes Ray's processes along
    done = subprocess.run(
        [sys.executable, "-c", _WATCHING, str(ray_folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert (lines[0], lines[-1]) == ("alive alive", "alive")
    assert lines[1].startswith("an agent-loop worker of verl died, and rollouts that need it")
