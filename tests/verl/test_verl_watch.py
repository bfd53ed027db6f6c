"""While the trainer waits for rollouts it hears of failures and of processes that died."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from remote_rl import errors
from shims.verl.watch import Watch, between_looks


@pytest.mark.parametrize("kind", [ReplayBuffer, ReplayBufferAsync])
def test_the_replay_buffer_asks_before_it_waits_again(kind: type[ReplayBuffer]) -> None:
    asked: list[str] = []
    buffer: Any = kind(
        trainer_mode="any",
        trainer_config={},
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs={},
        poll_interval=0.0,
    )
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
