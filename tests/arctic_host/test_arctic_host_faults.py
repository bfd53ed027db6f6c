"""Ends and failed starts of an engine's process, shown with the mock as the engine."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hosted_fragile
import psutil
import pytest
from test_arctic_hosting import SMALL, Hosted, train

from backends.arctic.child import Child
from backends.arctic.hosted import Served
from remote_rl import Session, connect
from remote_rl.errors import BackendError


class HostedFragile(Hosted):
    """refuse: a file; while it is there, no engine starts."""

    def __init__(self, refuse: Path) -> None:
        super().__init__()
        self._refuse = refuse

    def _new_child(self, base_version: int | None, served: Served) -> Child:
        environment = {"PYTHONPATH": str(Path(hosted_fragile.__file__).parent)}
        given = ({**SMALL, "refuse": str(self._refuse)},)
        child = Child(hosted_fragile.make, given, environment, served)
        self.children.append(child)
        return child


@pytest.fixture
def refuse(tmp_path: Path) -> Path:
    return tmp_path / "refuse"


@pytest.fixture
def backend(refuse: Path) -> HostedFragile:
    return HostedFragile(refuse)


@pytest.fixture
def session(backend: HostedFragile, tmp_path: Path) -> Iterator[Session]:
    with connect(backend, checkpoint_dir=tmp_path / "run") as session:
        yield session


def left_of(child: Child) -> list[object]:
    """Processes of its session, and its directory."""
    found: list[object] = [child.directory] if child.directory.exists() else []
    for each in psutil.process_iter():
        try:
            if each.status() != psutil.STATUS_ZOMBIE and os.getsid(each.pid) == child.process_id:
                found.append(each)
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    return found


def test_an_engine_that_loses_its_cluster_says_so(backend: HostedFragile, session: Session) -> None:
    (child,) = backend.children
    assert len(left_of(child)) == 3  # the directory, the process and its worker
    session.training.save("one").result()
    with pytest.raises(BackendError, match=r"process is gone \(the cluster is gone\)") as caught:
        session.sleep("training").result()
    assert caught.value.details["worker"] == "engine"
    assert left_of(child) == []
    session.training.load("one").result()
    session.weights.sync().result()
    train(session)


def test_a_kill_just_before_it_is_no_failure_of_a_load(
    backend: HostedFragile, session: Session
) -> None:
    session.training.save("one").result()
    for _ in range(3):
        child = backend.children[-1]
        psutil.Process(child.process_id).kill()
        assert session.training.load("one").result().name == "one"
        assert left_of(child) == []


def test_nothing_is_left_of_an_engine_that_does_not_start(
    backend: HostedFragile, refuse: Path
) -> None:
    refuse.touch()
    with pytest.raises(BackendError, match=r"ValueError: .*refuse is there"):
        connect(backend)
    (child,) = backend.children
    assert left_of(child) == []


def test_a_start_that_failed_once_is_tried_again(
    backend: HostedFragile, session: Session, refuse: Path
) -> None:
    session.training.save("one").result()
    psutil.Process(backend.children[-1].process_id).kill()
    refuse.touch()
    with pytest.raises(BackendError, match=r"refuse is there"):
        session.training.load("one").result()
    assert left_of(backend.children[-1]) == []
    with pytest.raises(BackendError, match=r"zero_grad failed: .*its start failed.* load"):
        session.training.zero_grad().result()
    refuse.unlink()
    assert session.training.load("one").result().name == "one"


OWNER = """
import sys, threading
from pathlib import Path
from remote_rl import connect
from test_arctic_host_faults import HostedFragile
backend = HostedFragile(Path(sys.argv[1]))
connect(backend)
(child,) = backend.children
for number in range(4000):
    (child.directory / str(number)).touch()
print(child.directory)
daemon = threading.Thread(target=backend.kill, daemon=True)
daemon.start()
daemon.join()
"""


def test_the_exit_of_this_process_waits_for_what_is_being_removed(refuse: Path) -> None:
    """Also where the engine was ended by a thread that no exit waits for, as the client's is."""
    told = subprocess.run(
        [sys.executable, "-c", OWNER, str(refuse)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    assert told.stdout
    assert not Path(told.stdout.strip()).exists()


def test_what_the_engine_logs_is_in_the_log_of_its_backend(
    backend: HostedFragile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), connect(backend, checkpoint_dir=tmp_path):
        pass
    told = [record for record in caplog.records if record.name == "remote_rl.arctic"]
    assert [record.levelno for record in told] == [logging.WARNING]
    assert told[0].getMessage().startswith("the worker is ")
