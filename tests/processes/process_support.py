"""Servers and clients as processes, which a test stops, continues and kills by their ids."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NIGHTLY = os.environ.get("REMOTE_RL_NIGHTLY") == "1"
PATIENCE = 60.0
LOOK = 0.01

SMALL: dict[str, Any] = {
    "vocab_size": 12,
    "window": 2,
    "embedding_size": 4,
    "hidden_size": 8,
    "initial_scale": 1.0,
    "eos_token_ids": [],
}


def until(what: str, condition: Callable[[], bool], patience: float = PATIENCE) -> float:
    """Looks until it is so, and returns how many seconds that took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < patience, f"not within {patience:g} s: {what}"
        time.sleep(LOOK)
    return time.monotonic() - begin


class Child:
    """One process, and signals to it alone."""

    def __init__(self, arguments: list[str], **options: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *arguments], text=True, stdout=subprocess.PIPE, **options
        )

    def line(self) -> str:
        """The next line of its stdout."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE)
        assert ready, "no line came"
        return self.process.stdout.readline()

    def kill(self) -> None:
        """SIGKILL, and waits until it is gone."""
        self.process.kill()
        self.process.wait(PATIENCE)

    def stop(self) -> None:
        """SIGSTOP, and waits until it stands."""
        self.process.send_signal(signal.SIGSTOP)
        state = Path(f"/proc/{self.process.pid}/stat")
        until("it stands", lambda: state.read_text().rpartition(")")[2].split()[0] == "T")

    def go_on(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Whatever became of it, it is gone afterwards."""
        if self.process.poll() is None:
            self.kill()
        for stream in (self.process.stdout, self.process.stdin):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


class Stage:
    """The test's side of `staged_engine`: what it has passed, and where it is held."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def passed(self) -> list[str]:
        """All points so far, in order."""
        path = self.folder / "passed"
        return path.read_text().splitlines() if path.exists() else []

    def reached(self, point: str) -> None:
        """Waits until it has been there."""
        until(point, lambda: point in self.passed())

    def hold(self, point: str) -> None:
        """From now on it waits there."""
        (self.folder / f"hold-{point}").touch()

    def release(self, point: str) -> None:
        """It goes on."""
        (self.folder / f"hold-{point}").unlink()

    def exits(self, point: str) -> None:
        """It leaves there by `sys.exit`."""
        (self.folder / f"exit-{point}").touch()


class ServerProcess(Child):
    """`remote-rl serve`, from its announcement on. Its log is the file `log`."""

    def __init__(self, backend: str, arguments: list[str], log: Path, path: str) -> None:
        self.log = log
        with log.open("a") as file:
            super().__init__(
                ["-m", "remote_rl", "serve", backend, *arguments],
                stderr=file,
                env={**os.environ, "PYTHONPATH": path},
            )
        line = self.line()
        assert " at http" in line, line + log.read_text()
        self.url = line.split(" at ")[1].split(" - ")[0]

    @property
    def port(self) -> str:
        """To start another one there."""
        return self.url.rpartition(":")[2]


class Puppet(Child):
    """A client process that runs what the test says."""

    def __init__(self) -> None:
        super().__init__([str(HERE / "client_puppet.py")], stdin=subprocess.PIPE)

    def tell(self, source: str) -> None:
        """Gives it something to do, without waiting."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(source) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """Its next answer: {"value": ...} or an error with message, details and cause."""
        answer: dict[str, Any] = json.loads(self.line())
        return answer

    def do(self, source: str) -> Any:
        """The value of what it does."""
        self.tell(source)
        answer = self.hear()
        assert "value" in answer, answer
        return answer["value"]


class Playground:
    """Starts processes below one folder; all are gone at its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stage = Stage(folder / "stage")
        self.checkpoints = folder / "checkpoints"
        self._children: list[Child] = []
        _entry_point(folder / "site")

    def server(
        self, *arguments: str, backend: str = "mock", port: str = "0", **options: Any
    ) -> ServerProcess:
        """`remote-rl serve`, with `options` of the backend beside the small mock's."""
        if backend == "staged":
            options["stage"] = str(self.stage.folder)
        given = [*arguments, "--port", port, "--checkpoint-dir", str(self.checkpoints)]
        for name, value in {**SMALL, **options}.items():
            given += ["--set", f"{name}={json.dumps(value)}"]
        path = os.pathsep.join([str(self.folder / "site"), str(HERE)])
        server = ServerProcess(backend, given, self.folder / "log", path)
        self._children.append(server)
        return server

    def puppet(self, target: str = "", how: str = "") -> Puppet:
        """A client process, connected as `rl` where a target is given; `how`: more arguments."""
        puppet = Puppet()
        self._children.append(puppet)
        if target:
            puppet.do(f"rl = connect({target!r}, {how})")
        return puppet

    def end(self) -> None:
        """Ends every process."""
        for child in self._children:
            child.end()


def _entry_point(site: Path) -> None:
    """Makes the staged engine known as a backend, as an installed package would."""
    facts = site / "staged_engine-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: staged-engine\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(
        "[remote_rl.backends]\nstaged = staged_engine:StagedBackend\n"
    )


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """What is promised to take no longer."""
    begin = time.monotonic()
    yield
    spent = time.monotonic() - begin
    assert spent < seconds, f"{spent:.1f} s instead of {seconds:g} s at most"
