"""A Ray cluster that a test starts and ends, on free ports, with a token of its own."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import pytest

HERE = Path(__file__).parent
#: Ray reads these when it is imported
os.environ |= {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
}


@attrs.frozen
class Started:
    """A cluster: its address, its temporary folder, its head process, and the environment that
    its processes have."""

    address: str
    environment: dict[str, str]
    folder: Path
    process: subprocess.Popen[str]


@contextmanager
def own_cluster(*paths: Path) -> Iterator[Started]:
    """Named by RAY_ADDRESS while it lives. paths: where its processes find modules too."""
    import ray

    # short, since the names of Ray's sockets in it may have 107 bytes
    folder = Path(tempfile.mkdtemp(prefix="rr", dir="/tmp"))
    found = os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": found}
    with (folder / "head.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "ray_cluster.py"), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        )
    with process, pytest.MonkeyPatch.context() as patch:
        assert process.stdin is not None
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (folder / "head.log").read_text()
        address = json.loads(line)["address"]
        patch.setenv("RAY_ADDRESS", address)
        try:
            yield Started(address, environment, folder, process)
        finally:
            ray.shutdown()  # first: Ray ends a client's process when it loses its head
            process.stdin.close()
            process.wait(60)
    shutil.rmtree(folder, ignore_errors=True)
