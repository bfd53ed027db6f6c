"""README's first command, from a copy of the source tree that holds no environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

from pages import blocks_of, commands_of

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 120.0
#: what a clone brings
CLONED = ("README.md", "LICENSE", "pyproject.toml", "remote_rl", "backends", "shims", "examples")


def test_the_first_command_installs_and_learns(tmp_path: Path) -> None:
    for name in CLONED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.png")
            shutil.copytree(source, tmp_path / name, ignore=ignored)
        else:
            shutil.copy(source, tmp_path / name)
    blocks = blocks_of((ROOT / "README.md").read_text(encoding="utf-8"))
    first = next(block for block in blocks if block.language == "console")
    ((command, _),) = commands_of(first.code)
    hidden = ("VIRTUAL_ENV", "PYTHONHOME", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    began = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=5 * LIMIT_SECONDS,
    )
    seconds = time.monotonic() - began
    assert done.returncode == 0, done.stdout + done.stderr
    rewards = [float(text) for text in re.findall(r"^step.*?reward (\S+)", done.stdout, re.M)]
    assert rewards[0] < 0.1
    assert sum(rewards[-5:]) / 5 > 0.9
    assert (tmp_path / "reward_curve.png").stat().st_size > 10_000
    print(f"the first command took {seconds:.0f} s, and should take {LIMIT_SECONDS:.0f} at most")
