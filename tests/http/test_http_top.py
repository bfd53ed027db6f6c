"""`remote-rl top`: what it shows, as lines, as JSON, in a terminal, and when the server goes."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import attrs
import pytest
from command_support import PATIENCE, address, line_of, remote_rl, running, stop

from remote_rl import AdamW, Batch, SamplingParams, connect, losses
from remote_rl.commands.top_view import Rates, as_json, as_lines, half_below
from remote_rl.run_info import Distribution, FailureStatus, OperationStatus, RunStatus
from remote_rl.types.results import WeightsVersion

SECONDS = Distribution(bounds=(0.5, 2), counts=(1, 0, 3), total=40.25)
STATUS = RunStatus(
    instance_id="i-1",
    backend="mock",
    model="tiny",
    software="remote_rl 0",
    uptime=12.5,
    versions=WeightsVersion(trainer=4, sampler=None, label="step 4"),
    driver=True,
    clients=2,
    paused=False,
    operations=[
        OperationStatus(
            name="generate",
            queued=1,
            running=2,
            succeeded=3,
            failed={"BackendError": 4},
            queue_seconds=SECONDS,
            run_seconds=SECONDS,
            received_bytes=5,
            sent_bytes=6,
        )
    ],
    generated_samples=7,
    generated_tokens=8,
    staleness=SECONDS,
    recent_mean=0.5,
    recent_max=3,
    last_failure=FailureStatus(operation="generate", error="BackendError", seconds_ago=1.5),
)


def later(**changes: object) -> RunStatus:
    (operation,) = STATUS.operations
    changed = attrs.evolve(operation, succeeded=13, received_bytes=2005, sent_bytes=1_000_006)
    return attrs.evolve(STATUS, operations=(changed,), generated_tokens=108, uptime=17.5, **changes)


def test_rates_are_those_between_two_looks() -> None:
    rates = Rates.between(STATUS, later(), 5.0)
    assert rates == Rates(
        operations=2.0, tokens=20.0, received=400.0, sent=200_000.0, since_start=False
    )


@pytest.mark.parametrize("earlier", [None, attrs.evolve(STATUS, instance_id="another run")])
def test_the_first_look_and_one_at_another_run_count_from_the_start(
    earlier: RunStatus | None,
) -> None:
    rates = Rates.between(earlier, STATUS, 0.0)
    assert rates.since_start
    assert rates.operations == pytest.approx(7 / 12.5)


def rows_of(status: RunStatus) -> dict[str, str]:
    lines = as_lines(status, Rates.between(STATUS, status, 5.0), "http://here")
    return {line.split(maxsplit=1)[0]: line for line in lines if line}


def test_it_shows_what_an_operator_asks_first() -> None:
    rows = rows_of(later())
    assert "http://here" in rows["server"]
    assert rows["state"].endswith("runs")
    assert "trainer 4, sampler unknown (label step 4)" in rows["weights"]
    assert "mean 0.50, max 3 versions" in rows["staleness"]
    assert "2.0 operations/s, 20 tokens/s, 400 B/s in, 200.0 kB/s out" in rows["rates"]
    assert "BackendError in generate, 0:00:01 ago" in rows["failure"]
    assert rows["generate"].split()[1:5] == ["2", "1", "13", "4"]


@pytest.mark.parametrize(
    ("changes", "row", "said"),
    [
        ({"lost": "the engine died"}, "state", "LOST: the engine died"),
        ({"paused": True, "stopping": True}, "state", "stopping, generation paused"),
        ({"driver": False, "clients": 0}, "clients", "0, no driver"),
        ({"recent_mean": None, "recent_max": None}, "staleness", "no samples yet"),
        ({"last_failure": None}, "failure", "none"),
        ({"versions": WeightsVersion(trainer=2, sampler=1)}, "weights", "trainer 2, sampler 1"),
        ({"operations": ()}, "no", "no operations yet"),
        ({"kept_bytes": 3_000_000_000_000}, "kept", "3.0 TB"),
    ],
)
def test_what_is_not_as_usual_is_said(changes: dict[str, object], row: str, said: str) -> None:
    assert said in rows_of(attrs.evolve(STATUS, **changes))[row]


def test_json_is_the_status_with_its_rates() -> None:
    data = json.loads(json.dumps(as_json(STATUS, Rates.between(None, STATUS, 1.0))))
    assert data["versions"] == {"trainer": 4, "sampler": None, "label": "step 4"}
    assert data["operations"][0]["failed"] == {"BackendError": 4}
    assert data["operations"][0]["run_seconds"] == {"count": 4, "mean": 10.0625, "half_below": None}
    assert data["rates"]["since_start"] is True


def test_half_below_is_a_bound_with_half_of_the_numbers() -> None:
    assert half_below(Distribution(bounds=(1, 2, 3), counts=(0, 2, 2, 0), total=1)) == 2
    assert half_below(Distribution(bounds=(1, 2), counts=(0, 0, 9), total=1)) is None
    assert half_below(Distribution(bounds=(1, 2), counts=(0, 0, 0), total=0)) is None


# -- the command ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with running("serve", "mock", "--port", "0") as process:
        url = address(process)
        batch = Batch(prompts=[[1]], prompt_index=[0], responses=[[2]], temperature=1.0)
        with connect(url) as session:
            session.sampling.generate([[1]], SamplingParams(max_tokens=3)).result()
            session.training.forward_backward(batch, losses.CrossEntropy())
            session.training.optim_step(AdamW(lr=0.1)).result()
        yield url
        stop(process)


def test_once_prints_one_block(server: str) -> None:
    result = remote_rl("top", server, "--once")
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout
    assert re.search(r"^optim_step +0 +0 +1 +0 ", result.stdout, re.MULTILINE)
    assert "since the start" in result.stdout
    assert "trainer 1, sampler 0" in result.stdout


def test_once_as_json_is_one_object(server: str) -> None:
    result = remote_rl("top", server, "--once", "--json")
    (line,) = result.stdout.splitlines()
    assert json.loads(line)["versions"]["trainer"] == 1


def test_without_a_terminal_it_prints_a_block_an_interval_until_it_is_interrupted(
    server: str,
) -> None:
    with running("top", server, "--interval", "0.1") as process:
        blocks = 0
        while blocks < 3:
            blocks += line_of(process.stdout).startswith("server ")
        code, out, err = stop(process, signal.SIGINT)
    assert (code, err) == (0, "")
    assert "\x1b" not in out


def test_a_pipe_that_closes_ends_it_quietly(server: str) -> None:
    command = f"{sys.executable} -m remote_rl top {server} --interval 0.05 --json | head -1"
    result = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=PATIENCE
    )
    assert json.loads(result.stdout)
    assert result.stderr == ""


def test_in_a_terminal_it_redraws_itself(server: str) -> None:
    controller, terminal = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "remote_rl", "top", server, "--interval", "0.1"],
        stdin=terminal,
        stdout=terminal,
        stderr=subprocess.PIPE,
    ) as process:
        os.close(terminal)
        seen, end = b"", time.monotonic() + PATIENCE
        try:
            while seen.count(b"\x1b[J") < 3 and time.monotonic() < end:
                ready, _, _ = select.select([controller], [], [], PATIENCE)
                assert ready
                seen += os.read(controller, 65536)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
            os.close(controller)
    assert process.returncode == 0, err
    assert err == b""
    assert re.search(rb"\x1b\[\d+A\r\x1b\[J", seen)


def test_a_server_that_goes_is_code_1_with_a_sentence() -> None:
    with (
        running("serve", "mock", "--port", "0") as serving,
        running("top", address(serving), "--interval", "0.1") as process,
    ):
        assert line_of(process.stdout).startswith("server ")
        stop(serving)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "UnreachableError" in err
    assert "Traceback" not in err


def test_no_server_and_no_token_are_code_1() -> None:
    result = remote_rl("top", "http://127.0.0.1:9", "--once")
    assert result.returncode == 1
    assert "UnreachableError" in result.stderr


def test_help_teaches_with_examples_and_exit_codes() -> None:
    for command in ("top", "info", "serve"):
        text = remote_rl(command, "--help").stdout
        assert f"$ remote-rl {command} " in text
        assert "Exit codes:" in text
    assert "exit codes:" in remote_rl("--help").stdout
