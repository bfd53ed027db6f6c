"""Servers and trainings of the end-to-end tests, started as users start them.

REMOTE_RL_SERVER_PYTHON is the interpreter of the servers' environment; without it, this environment
serves. The shim is loaded by the entry point of the installed package.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl_workload import overrides

from remote_rl import connect

Row = dict[str, Any]
#: how often a training's metrics are looked at
POLL_SECONDS = 0.2
_METRICS = "metrics.jsonl"


class Server:
    """`remote-rl serve BACKEND` in a process of its own, which may die and come back.

    settings: the text of its TOML file. folder: of its log, settings and checkpoints. python: the
    interpreter of its environment. lease: of its clients, in seconds. url: where it is, also after
    another `start`.
    """

    def __init__(
        self, backend: str, settings: str, folder: Path, *, python: str, lease: float = 60.0
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.checkpoints = folder / "checkpoints"
        self._log = folder / "server.err"
        config = folder / f"{backend}.toml"
        config.write_text(settings)
        self._command = [str(Path(python).with_name("remote-rl")), "serve", backend]
        self._command += ["--checkpoint-dir", str(self.checkpoints), "--config", str(config)]
        self._command += ["--lease", str(lease)]
        self._port = "0"
        self.start()

    @property
    def process_id(self) -> int:
        """Of the server itself."""
        return self._process.pid

    def start(self) -> None:
        """Serves a new run, at the same address as the one before."""
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [*self._command, "--port", self._port],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found = re.search(r"http://[^\s\"']+:(\d+)", line)
        if found is None:
            self.stop()
            raise AssertionError(f"the server said {line!r}: {self._log.read_text()}")
        self.url, self._port = found.group(), found.group(1)

    def kill(self) -> None:
        """It dies without a word."""
        self._process.kill()
        self.stop()

    def stop(self) -> None:
        """Ends it, where it has not ended."""
        self._process.terminate()
        self._process.wait(timeout=60)
        assert self._process.stdout is not None
        self._process.stdout.close()


class MockProcess(Server):
    """One of the mock, with these options."""

    def __init__(self, folder: Path, *, lease: float = 60.0, **options: Any) -> None:
        settings = "".join(f"{name} = {value}\n" for name, value in options.items())
        python = os.environ.get("REMOTE_RL_SERVER_PYTHON") or sys.executable
        super().__init__("mock", settings, folder, python=python, lease=lease)


@contextmanager
def serve_mock(folder: Path, **options: Any) -> Iterator[str]:
    """A server of the mock; yields its address."""
    server = MockProcess(folder, **options)
    try:
        yield server.url
    finally:
        server.stop()


class Trainings:
    """Runs `main_ppo`, several times with the same folders.

    inputs: what `verl_workload.build_inputs` made. folder: of checkpoints and metrics.
    """

    def __init__(self, inputs: dict[str, Path], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._inputs = {**inputs, "checkpoints": folder / "checkpoints"}
        self._folder = folder
        # a folder of its own for Ray, whose path is short enough for its sockets
        self._ray = Path(tempfile.mkdtemp(prefix="rl", dir="/tmp"))

    def __call__(
        self,
        url: str,
        *more: str,
        steps: int,
        after_a_step: Callable[[int], None] | None = None,
        timeout: float = 1200.0,
    ) -> tuple[subprocess.CompletedProcess[str], list[Row]]:
        """One training of `steps` steps against an address, with further `key=value` overrides:
        the process, and one row of metrics a logged step.

        after_a_step: called with the process's id when the first step was logged. timeout: seconds
        that may pass until then, and from then on until the end; a process that takes longer is
        killed, and the test has failed.
        """
        metrics, log = self._folder / _METRICS, self._folder / "training.log"
        ray_init = ("address=local", f"_temp_dir={self._ray}")
        arguments = [
            *overrides(self._inputs, url, steps=steps),
            *(f"+ray_kwargs.ray_init.{each}" for each in ray_init),
            *more,
        ]
        environment = {
            **{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
            "VERL_FILE_LOGGER_PATH": str(metrics),
            "HF_HUB_OFFLINE": "1",
            "HYDRA_FULL_ERROR": "1",
            # Ray's own is too short for a machine with much else to do
            "RAY_raylet_start_wait_time_s": "600",
        }
        metrics.unlink(missing_ok=True)
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments]
        with log.open("w") as out:
            process = subprocess.Popen(
                command, env=environment, cwd=self._folder, stdout=out, stderr=subprocess.STDOUT
            )
            try:
                if after_a_step is not None and self._has_logged(process, timeout):
                    after_a_step(process.pid)
                process.wait(timeout)
            except BaseException:
                process.kill()
                process.wait()
                raise
        done = subprocess.CompletedProcess(command, process.returncode, log.read_text())
        return done, self.rows()

    def _has_logged(self, process: subprocess.Popen[bytes], timeout: float) -> bool:
        """Waits for the first step; False where the process ends without one."""
        end = time.monotonic() + timeout
        while not self.rows():
            if process.poll() is not None:
                return False
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(process.args, timeout)
            time.sleep(POLL_SECONDS)
        return True

    def rows(self) -> list[Row]:
        """What the training has logged so far."""
        metrics = self._folder / _METRICS
        lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def close(self) -> None:
        """Removes Ray's files."""
        shutil.rmtree(self._ray, ignore_errors=True)


def descendants(process_id: int, name: str) -> list[int]:
    """Ids of a process's children, and of theirs, whose title begins with `name`."""
    found: dict[int, tuple[int, str]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "status").read_text()
            title = (folder / "cmdline").read_text().replace("\0", " ").strip()
        except OSError:
            continue  # it has ended meanwhile
        parent = re.search(r"^PPid:\s*(\d+)$", status, re.MULTILINE)
        assert parent is not None
        found[int(folder.name)] = (int(parent.group(1)), title)
    return [
        each
        for each, (_, title) in found.items()
        if title.startswith(name) and process_id in _ancestors(each, found)
    ]


def _ancestors(process_id: int, found: dict[int, tuple[int, str]]) -> list[int]:
    ancestors = []
    while process_id in found:
        process_id = found[process_id][0]
        ancestors.append(process_id)
    return ancestors


def connect_and_read(url: str) -> Any:
    """Versions that the server holds, read as a driver that changes nothing."""
    with connect(url, start="current") as session:
        return session.weights.version().result()
