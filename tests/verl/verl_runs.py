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


@contextmanager
def serve_mock(folder: Path, **options: Any) -> Iterator[str]:
    """A server of the mock; yields its address."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "mock.toml"
    settings.write_text("".join(f"{name} = {value}\n" for name, value in options.items()))
    python = os.environ.get("REMOTE_RL_SERVER_PYTHON") or sys.executable
    command = [str(Path(python).with_name("remote-rl")), "serve", "mock", "--port", "0"]
    command += ["--checkpoint-dir", str(folder / "checkpoints"), "--config", str(settings)]
    with (folder / "server.err").open("w") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        found = re.search(r"http://[^\s\"']+", line)
        assert found, f"the server said {line!r}: {(folder / 'server.err').read_text()}"
        yield found.group()
    finally:
        server.terminate()
        server.wait(timeout=30)
        server.stdout.close()


class Trainings:
    """Runs `main_ppo`, several times with the same folders.

    inputs: what `verl_workload.build_inputs` made. folder: of checkpoints and metrics.
    """

    def __init__(self, inputs: dict[str, Path], folder: Path) -> None:
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
    ) -> tuple[subprocess.CompletedProcess[str], list[Row]]:
        """One training of `steps` steps against an address, with further `key=value` overrides:
        the process, and one row of metrics a logged step.

        after_a_step: called with the process's id when the first step was logged.
        """
        metrics, log = self._folder / "metrics.jsonl", self._folder / "training.log"
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
        }
        metrics.unlink(missing_ok=True)
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments]
        with log.open("w") as out:
            process = subprocess.Popen(
                command, env=environment, cwd=self._folder, stdout=out, stderr=subprocess.STDOUT
            )
            while after_a_step is not None and process.poll() is None:
                if metrics.exists() and metrics.stat().st_size:
                    after_a_step(process.pid)
                    break
                time.sleep(POLL_SECONDS)
            process.wait()
        done = subprocess.CompletedProcess(command, process.returncode, log.read_text())
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return done, [json.loads(line) for line in lines]

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
