"""The examples, as their users run them: in a process of their own, by what they print."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
REMOTE_RL = str(Path(sys.executable).with_name("remote-rl"))


def run(name: str, *arguments: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def steps_of(printed: str) -> list[str]:
    """The line of each step, without the seconds."""
    lines = [line for line in printed.splitlines() if line.startswith("step")]
    return [re.sub(r"\s+seconds .*", "", line) for line in lines]


def rewards_of(printed: str) -> list[float]:
    return [float(text) for text in re.findall(r"^step.*?reward (\S+)", printed, re.MULTILINE)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of `remote-rl serve mock` in another process."""
    command = [REMOTE_RL, "serve", "mock", "--port", "0", "--log-level", "warning"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        assert process.stdout is not None
        found = re.search(r'connect\("([^"]+)"\)', process.stdout.readline())
        assert found is not None
        yield found.group(1)
    finally:
        process.terminate()
        process.wait(30)
        assert process.stdout is not None
        process.stdout.close()


def test_grpo_learns_and_draws_its_curve(tmp_path: Path) -> None:
    printed = run("grpo.py", "--steps", "60", "--plot", "curve.png", folder=tmp_path)
    rewards = rewards_of(printed)
    assert len(rewards) == 60
    assert rewards[0] < 0.1
    assert sum(rewards[-5:]) / 5 > 0.8
    assert "reward over steps" in printed
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    for name in ("loss", "grad_norm", "entropy", "version", "staleness", "seconds"):
        assert f" {name} " in printed


def test_grpo_prints_the_same_numbers_over_http(tmp_path: Path, server: str) -> None:
    here = run("grpo.py", "--steps", "6", folder=tmp_path)
    there = run("grpo.py", "--steps", "6", "--target", server, folder=tmp_path)
    assert len(steps_of(here)) == 6
    assert steps_of(here) == steps_of(there)
    again = run("grpo.py", "--steps", "6", "--target", server, folder=tmp_path)
    assert rewards_of(again) == rewards_of(here)  # start="base" is a fresh run, versions apart


def test_sft_answers_everything(tmp_path: Path) -> None:
    printed = run("sft.py", "--epochs", "25", folder=tmp_path)
    assert printed.splitlines()[-1] == "55 of 55 answers are right"


def test_one_step_off_knows_its_staleness(tmp_path: Path) -> None:
    printed = run("one_step_off.py", "--steps", "31", folder=tmp_path)
    stale = re.findall(r"staleness (\d+) to (\d+)", printed)
    assert stale[0] == ("0", "0")
    assert set(stale[1:]) == {("1", "1")}
    rewards = rewards_of(printed)
    assert rewards[0] < 0.1
    assert rewards[-1] > 0.5


def test_a_second_process_attaches_by_handle(tmp_path: Path) -> None:
    printed = run("attach_by_handle.py", folder=tmp_path)
    assert "driver: driver of the run" in printed
    assert "member: member, says '7' at version 10, label 'ten steps'" in printed


def test_a_resumed_run_repeats_the_uninterrupted_one(tmp_path: Path) -> None:
    printed = run("resume.py", "--steps", "4", folder=tmp_path)
    assert "resumed rewards equal the uninterrupted ones" in printed


def test_the_committed_problems_are_the_script_s() -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); import json, make_arithmetic as m; "
        "print(''.join(json.dumps(p) + chr(10) for p in m.problems()), end='')"
    )
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert made.stdout == (EXAMPLES / "data" / "arithmetic.jsonl").read_text(encoding="utf-8")
