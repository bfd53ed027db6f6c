"""`remote-rl serve arctic` on CPUs for the trainings of the shims' tests: what it may leave behind,
and whether its two halves have one policy.

REMOTE_RL_ARCTIC_PYTHON is the interpreter of the server's environment; `nox -s verl-arctic` and
`nox -s skyrl-arctic` make it and set it. Imports numpy, arctic's list of leftovers and remote_rl.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from verl_runs import Server, descendants

from backends.arctic.leftovers import Owner, owner_of
from remote_rl import Batch, SamplingParams, connect
from remote_rl.errors import BackendError

PYTHON = os.environ.get("REMOTE_RL_ARCTIC_PYTHON")
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
