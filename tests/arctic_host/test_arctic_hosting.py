"""A backend whose engine lives in a process of its own, shown with the mock as the engine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hosted_mock
import psutil
import pytest

from backends.arctic.child import Child
from backends.arctic.hosted import HostedBackend, Served
from backends.mock.backend import MockBackend
from backends.mock.config import MockConfig
from remote_rl import AdamW, Batch, SamplingParams, Session, connect, losses
from remote_rl.errors import BackendError
from remote_rl.testing.conformance.runner import Target, run

SMALL: dict[str, Any] = {
    "window": 3,
    "embedding_size": 4,
    "hidden_size": 16,
    "initial_scale": 1.0,
}


class Hosted(HostedBackend):
    """The mock behind a child; what isn't an operation it says itself."""

    name = "mock"

    def __init__(self, **options: Any) -> None:
        super().__init__(self._new_child)
        self._options = {**SMALL, **options}
        self._facts = MockBackend(MockConfig(**self._options))
        self.seed, self.model = self._facts.seed, self._facts.model
        self.capabilities = self._facts.capabilities
        self.children: list[Child] = []

    def _new_child(self, base_version: int | None, served: Served) -> Child:
        environment = {"PYTHONPATH": str(Path(hosted_mock.__file__).parent)}
        child = Child(hosted_mock.make, (self._options,), environment, served)
        self.children.append(child)
        return child

    async def tokenizer(self, request: Any, context: Any) -> Any:
        return await self._call("tokenizer", request, context)


@pytest.fixture
def backend() -> Hosted:
    return Hosted(faults=[{"operation": "sleep", "error": "exit"}])


@pytest.fixture
def session(backend: Hosted, tmp_path: Path) -> Iterator[Session]:
    with connect(backend, checkpoint_dir=tmp_path) as session:
        yield session


def train(session: Session, lr: float = 0.1) -> int:
    groups = session.sampling.generate([[1, 2]], SamplingParams(n=2, max_tokens=3, seed=1)).result()
    batch = Batch.from_groups(groups, advantages=[1.0, -1.0])
    session.training.forward_backward(batch, losses.PPO())
    return session.training.optim_step(AdamW(lr=lr)).result().version


def test_the_engine_says_what_it_computes_on(tmp_path: Path) -> None:
    backend = Hosted(peak_flops=1e12, faults=[{"operation": "sleep", "error": "exit"}])
    assert backend.devices is None  # before the start nobody knows
    with connect(backend, checkpoint_dir=tmp_path) as session:
        devices = session.info().result().devices
        assert devices == MockBackend(MockConfig(peak_flops=1e12)).devices
        with pytest.raises(BackendError):
            session.sleep("training").result()
        session.reset().result()  # starts another engine
        assert session.info().result().devices == devices


def test_conformance_passes_through_the_other_process(tmp_path: Path) -> None:
    session = connect(Hosted(), checkpoint_dir=tmp_path)
    try:
        reports = run(Target(session=session, tolerance=1e-5, learning_rate=1e-2))
    finally:
        session.detach()
    assert [(each.name, each.reason) for each in reports if each.verdict == "failed"] == []
    assert sum(each.verdict == "passed" for each in reports) > 100


def test_a_killed_engine_fails_what_runs_and_load_starts_another(
    backend: Hosted, session: Session
) -> None:
    train(session)
    session.training.save("one").result()
    with pytest.raises(BackendError, match=r"sleep failed: .* exited with code 70.* load"):
        session.sleep("training").result()
    with pytest.raises(BackendError, match="process is gone"):
        session.training.zero_grad().result()
    assert session.weights.version().result().sampler is None
    loaded = session.training.load("one").result()
    assert loaded.version > loaded.saved_version
    session.weights.sync().result()
    assert train(session) == loaded.version + 1
    assert len(backend.children) == 2


def test_nothing_is_left_of_an_engine_however_it_ends(backend: Hosted, session: Session) -> None:
    train(session)
    (child,) = backend.children
    assert child.directory.exists()
    process = psutil.Process(child.process_id)
    process.kill()
    with pytest.raises(BackendError):
        session.training.zero_grad().result()
    assert not child.directory.exists()
    session.reset().result()
    second = backend.children[-1]
    session.close()
    assert not second.directory.exists()
    assert not psutil.pid_exists(second.process_id)


def test_a_pause_outlives_the_engine(backend: Hosted, session: Session) -> None:
    session.sampling.pause().result()
    with pytest.raises(BackendError):
        session.sleep("training").result()
    session.reset().result()
    held = session.sampling.generate([[1]], SamplingParams(max_tokens=1))
    session.training.zero_grad().result()
    assert not held.done()
    session.sampling.resume().result()
    assert len(held.result()) == 1


ORPHAN = """
import asyncio, os, signal
from test_arctic_hosting import Hosted
from remote_rl import connect
backend = Hosted()
connect(backend)
print(backend.children[0].process_id, backend.children[0].directory, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_an_engine_whose_backend_is_killed_ends_and_cleans_up() -> None:
    here = str(Path(__file__).parent)
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": here},
    ) as process:
        assert process.stdout is not None
        number, directory = process.stdout.readline().split()
    try:
        psutil.Process(int(number)).wait(timeout=15)
    except psutil.NoSuchProcess:
        pass  # it was faster
    assert not Path(directory).exists()


def test_its_folder_has_a_short_name_wherever_temporary_files_go(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    child = Hosted()._new_child(None, lambda version, label: None)
    # Ray puts sockets 60 characters below it, and their names may have 107 bytes
    assert len(str(child.directory)) <= 30
    child.directory.rmdir()
