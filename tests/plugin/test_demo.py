"""`remote-rl demo` as a newcomer runs it: in a process of its own, by what it prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from remote_rl import connect
from remote_rl.commands.curve import curve, spark_line
from remote_rl.testing import MockServer

PATIENCE = 120
_WITHOUT_PLOTEXT = (
    "import sys; sys.modules['plotext'] = None; from remote_rl.cli import main; sys.exit(main())"
)
REWARD = re.compile(r"^reward: ([\d.]+) in the first step, ([\d.]+) in the last; \d+ s$", re.M)


def demo(
    *arguments: str, program: tuple[str, ...] = ("-m", "remote_rl"), **environment: str
) -> subprocess.CompletedProcess[str]:
    """A whole run."""
    return subprocess.run(
        [sys.executable, "-W", "error", *program, "demo", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def steps_of(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith("step ")]


def test_it_learns_and_says_so() -> None:
    ran = demo("--steps", "24", program=("-c", _WITHOUT_PLOTEXT))
    assert (ran.returncode, ran.stderr) == (0, "")
    found = REWARD.search(ran.stdout)
    assert found is not None, ran.stdout
    assert float(found[1]) < 0.05
    assert float(found[2]) > 0.5
    lines = steps_of(ran.stdout)
    assert 10 <= len(lines) <= 13
    assert lines[0].startswith("step   0  reward 0.0")
    assert lines[-1].startswith("step  23  ")
    assert re.search(r"it says \d\+\d=.$", lines[-1])
    assert "reward over steps, from 0 to 1:  ▁" in ran.stdout
    for word in ("examples/grpo.py", "docs/quickstart.md", "remote-rl serve mock"):
        assert word in ran.stdout


def test_a_seed_is_the_run_s() -> None:
    one, other = (steps_of(demo("--steps", "1", "--seed", number).stdout) for number in "78")
    assert len(one) == len(other) == 1
    assert one != other


def test_on_a_server() -> None:
    with MockServer(profile="full") as server:
        ran = demo("--target", server.url, "--steps", "2")
        assert (ran.returncode, ran.stderr) == (0, ""), ran
        assert f"mock, at {server.url}" in ran.stdout
        assert steps_of(ran.stdout) == steps_of(demo("--steps", "2", "--seed", "0").stdout)
        assert server.calls.names("optim_step", "sync") == ["optim_step", "sync"] * 2
        assert not server.driven

        again = demo("--target", server.url, "--steps", "1")
        assert (again.returncode, again.stdout) == (2, "")
        assert "start='base', start='current'" in again.stderr
        assert demo("--target", server.url, "--steps", "1", "--start", "current").returncode == 0
        with connect(server.url, start="current") as rl:
            versions = rl.weights.version().result()
        assert (versions.trainer, versions.sampler, versions.label) == (3, 3, 0)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--target", "mokc"), 2, "there is no backend 'mokc'; did you mean 'mock'?"),
        (("--target", "http://127.0.0.1:9"), 1, "nothing answers at http://127.0.0.1:9"),
        (("--target", "http://127.0.0.1:9", "--seed", "3"), 2, "seed="),
        (("--target", "http://127.0.0.1:9", "--token-file", "no-such-file"), 2, "no-such-file"),
        (("--steps", "0"), 2, "--steps"),
        (("--start", "no-such-checkpoint"), 2, "this run keeps no files"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(
    arguments: tuple[str, ...], code: int, said: str
) -> None:
    ran = demo(*arguments)
    assert ran.returncode == code
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr
    assert ran.stdout == ""


def test_a_terminal_that_prints_ascii_only() -> None:
    ran = demo("--steps", "2", PYTHONIOENCODING="ascii")
    assert ran.returncode == 0, ran.stderr
    assert "from 0 to 1:  __" in ran.stdout


def test_help_teaches() -> None:
    ran = demo("--help")
    assert ran.returncode == 0
    for word in ("remote-rl demo --target http://127.0.0.1:7700", "--start", "--seed", "--steps"):
        assert word in ran.stdout


def test_the_line_of_blocks() -> None:
    assert spark_line([0.0, 0.5, 1.0]) == "▁▅█"
    assert spark_line([-1.0, 2.0]) == "▁█"
    assert spark_line([0.25] * 100, width=10) == "▃" * 10
    assert spark_line([0.0] * 60 + [1.0] * 60, width=2) == "▁█"


def test_the_curve_of_plotext_where_it_is_installed() -> None:
    pytest.importorskip("plotext")
    drawn = curve([0.0, 0.5, 1.0], "a title")
    assert "a title" in drawn
    assert len(drawn.splitlines()) > 10
    assert "\x1b" not in drawn
