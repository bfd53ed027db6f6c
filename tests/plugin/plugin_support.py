"""pytest in a process of its own, with the plug-in, on files that a test writes."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

MODULE = "remote_rl.testing.pytest_plugin"
PATIENCE = 120
#: an editable installation may be older than the entry point
INSTALLED = any(
    point.value == MODULE for point in importlib.metadata.entry_points(group="pytest11")
)
#: the plug-in's name for pytest
NAME = "remote_rl" if INSTALLED else MODULE

_IMPORTS = """\
import pytest
from remote_rl import AdamW, Batch, SamplingParams, connect, errors, losses
from remote_rl.testing import Faults, fault

def step(rl):
    groups = rl.sampling.generate([[1, 2]], SamplingParams(n=2, max_tokens=3)).result()
    rl.training.forward_backward(Batch.from_groups(groups, advantages=[1.0, -1.0]), losses.PPO())
    return rl.training.optim_step(AdamW(lr=0.1)).result().grad_norm
"""


class Ran(NamedTuple):
    """How it ended. counts: what the last line says, e.g. {"passed": 2, "error": 1}."""

    code: int
    output: str
    counts: dict[str, int]


def run_pytest(folder: Path, tests: str, *arguments: str, ini: str = "") -> Ran:
    """Runs a file of these tests; warnings are errors."""
    (folder / "test_of_a_user.py").write_text(_IMPORTS + dedent(tests), encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n" + dedent(ini), encoding="utf-8")
    plugin = [] if INSTALLED or f"no:{NAME}" in arguments else ["-p", MODULE]
    # the last two change what pytest prints: with them its summary repeats whole messages
    hidden = (
        *("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD"),
        *("CI", "BUILD_NUMBER"),
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-W", "error", "--strict-markers", *plugin, *arguments],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name not in hidden},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    output = done.stdout + done.stderr
    last = output.strip().splitlines()[-1]
    counts = {word.rstrip("s"): int(count) for count, word in re.findall(r"(\d+) ([a-z]+)", last)}
    return Ran(done.returncode, output, counts)
