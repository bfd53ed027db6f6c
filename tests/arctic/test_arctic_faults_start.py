"""Starts that fail or are broken off, and the end of the process that holds the backend: a named
error where somebody is there to hear it, and nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from arctic_faults import NIGHTLY, PATIENCE, Processes, until, within
from arctic_models import write_model

from backends.arctic.config import ArcticConfig
from backends.arctic.engine_factory import environment
from remote_rl import Session, connect
from remote_rl.errors import BackendError, RemoteRLError, UnreachableError

nightly = pytest.mark.skipif(not NIGHTLY, reason="takes long: REMOTE_RL_NIGHTLY=1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("start") / "model", "llama", head_dim=32)


def failure(model: Path, folder: Path, **placement: Any) -> RemoteRLError:
    """What a start fails with, after which nothing of it is there."""

    def begin() -> Session:
        options = {"device": "cpu", **placement}
        return connect("arctic", model=str(model), placement=options, checkpoint_dir=folder)

    with ThreadPoolExecutor(1) as thread:
        starting = thread.submit(begin)
        processes = Processes()
        until("it has begun", lambda: has_begun(processes) or starting.done())
        if starting.done():
            starting.result()
        traces = processes.traces()
        error = starting.exception(PATIENCE)
    assert isinstance(error, RemoteRLError)
    assert traces.left() == []
    return error


def has_begun(processes: Processes) -> bool:
    """Whether the engine's process is there."""
    try:
        return bool(processes.host.cmdline())
    except (ValueError, psutil.NoSuchProcess):
        return False


def test_a_cluster_that_is_not_there(model: Path, tmp_path: Path) -> None:
    with within(60):
        error = failure(model, tmp_path, address="127.0.0.1:1")
    assert isinstance(error, UnreachableError)
    assert "no Ray cluster answers at '127.0.0.1:1'" in str(error)


def test_a_start_that_takes_longer_than_it_may(model: Path, tmp_path: Path) -> None:
    error = failure(model, tmp_path, start_timeout=0.5)
    assert "was not done within 0.5 s, what placement.start_timeout allows" in str(error)


#: starts two ranks; the port where they are to meet is taken as often as told
_MEETING = """
import asyncio, json, socket, sys
from pathlib import Path
from backends.arctic import trainers
from backends.arctic.cluster import Cluster
from backends.arctic.config import ArcticConfig
from remote_rl.errors import BackendError

model, folder, times = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
taken = socket.create_server(("", 0))
for number in range(times):
    (folder / f"still {number}").touch()

class Actor(trainers.RankActor):
    def address(self):
        host, port, process = super().address()
        if not self._place[0]:
            (folder / "asked").open("a").write("x")
            for mark in folder.glob("still *"):
                mark.unlink()
                return host, unlucky, process
        return host, port, process

class Context:
    def progress(self, done, total=None, what=""): ...

unlucky, trainers.RankActor = taken.getsockname()[1], Actor
config = ArcticConfig(
    model=model, training={"ranks": 2}, sampling={"engines": 1}, placement={"device": "cpu"}
)

async def main():
    cluster = Cluster(config, folder)
    cluster.join()
    group = trainers.TrainerGroup(config, cluster)
    try:
        await group.start(Context(), lambda: None)
        told = await group.everywhere("sleep", context=Context()) and "started"
    except BackendError as error:
        told = str(error)
    asked = len((folder / "asked").read_text())
    group.end()
    await cluster.close()
    print(json.dumps([told, asked]))

asyncio.run(main())
"""


def meeting(model: Path, times: int) -> tuple[str, int]:
    """What became of a start, and how often a port was chosen."""
    folder = Path(tempfile.mkdtemp(prefix="rr", dir="/tmp"))  # short, for Ray's sockets
    config = ArcticConfig(model=str(model), placement={"device": "cpu"})
    try:
        told = subprocess.run(
            [sys.executable, "-c", _MEETING, str(model), str(folder), str(times)],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            timeout=2 * PATIENCE,
            env={**os.environ, **environment(config)},
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    what, asked = json.loads(told.stdout.splitlines()[-1])
    return what, asked


def test_ranks_whose_port_somebody_else_took_meet_at_another(model: Path) -> None:
    assert meeting(model, 1) == ("started", 2)


@nightly
def test_ports_that_are_always_taken_are_not_tried_for_ever(model: Path) -> None:
    error, asked = meeting(model, 5)
    assert "rank 0 failed" in error
    assert "address already in use" in error
    assert asked == 2


def damaged(model: Path, change: Callable[[Path], None]) -> Path:
    other = model.with_name("damaged")
    for name in ("config.json", "model.safetensors"):
        other.mkdir(exist_ok=True)
        (other / name).write_bytes((model / name).read_bytes())
    change(other)
    return other


def of_an_unknown_kind(folder: Path) -> None:
    facts = json.loads((folder / "config.json").read_text())
    facts |= {"model_type": "unheard_of", "architectures": ["UnheardOfForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(facts))


def test_a_model_that_nobody_knows(model: Path, tmp_path: Path) -> None:
    """The message says what transformers or vLLM said, the details where."""
    error = failure(damaged(model, of_an_unknown_kind), tmp_path)
    assert "unheard_of" in str(error) or "UnheardOf" in str(error)
    assert isinstance(error, BackendError)
    assert error.details["worker"].startswith(("rank ", "sampling engine "))
    assert "Traceback" in error.details["traceback"]


OWNER = """
import sys
from arctic_faults import LONG, PROMPTS, start
with start(sys.argv[1], sys.argv[2], ranks=1, engines=1) as session:
    print("ready", flush=True)
    input()
    session.weights.sync().result()
    session.sampling.pause().result()
    print("waiting", flush=True)
    session.sampling.generate(PROMPTS, LONG).result()
"""


@pytest.fixture
def owner(model: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that starts an engine and uses it."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(model), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    ) as process:
        yield process
        process.kill()


def ready(owner: subprocess.Popen[str]) -> Processes:
    """Its processes, once the engine has started."""
    assert owner.stdout is not None
    assert owner.stdout.readline() == "ready\n"
    return Processes(owner.pid)


def go_on(owner: subprocess.Popen[str]) -> None:
    assert owner.stdin is not None
    owner.stdin.write("\n")
    owner.stdin.flush()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_the_end_of_the_process_in_a_start(
    owner: subprocess.Popen[str], sent: signal.Signals
) -> None:
    processes = Processes(owner.pid)
    until("it has begun", lambda: has_begun(processes))
    until("Ray is there", lambda: processes.named("raylet"))
    traces = processes.traces()
    owner.send_signal(sent)
    with within(15):
        _, output = owner.communicate(timeout=PATIENCE)
        traces.are_gone(15)
    if sent == signal.SIGINT:
        assert "KeyboardInterrupt" in output


def test_the_process_is_killed_in_a_delivery(owner: subprocess.Popen[str]) -> None:
    processes = ready(owner)
    traces = processes.traces()
    processes.samplers[0].suspend()
    go_on(owner)
    until("the weights are on their way", traces.segments)
    owner.kill()
    traces.are_gone(15)


@nightly
def test_control_c_while_it_waits_for_samples(owner: subprocess.Popen[str]) -> None:
    traces = ready(owner).traces()
    go_on(owner)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "waiting\n"
    owner.send_signal(signal.SIGINT)
    with within(30):
        _, output = owner.communicate(timeout=PATIENCE)
    assert "KeyboardInterrupt" in output
    assert traces.left() == []
