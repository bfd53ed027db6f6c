"""How a server ends: stopped in order, cut short, or with its run lost."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from command_support import PATIENCE, address, line_with, remote_rl, running, stop
from http_support import LONG, speaking

from remote_rl import AdamW, Batch, SamplingParams, connect, losses
from remote_rl.errors import RunLostError, UnreachableError
from remote_rl.messages import Observe

BATCH = Batch(prompts=[[1, 2]], prompt_index=[0], responses=[[3, 4]], temperature=1.0)
#: a step that outlasts the time until the server hears a signal
SLOW = ("--set", 'latency={"forward_backward": 2, "token": 1000}', "--lease", "3")


def until_running(url: str, operation: str) -> None:
    """Until an operation has begun."""

    async def look() -> None:
        async with speaking(url) as transport:
            running_now: set[str] = set()
            while operation not in running_now:
                status = await transport.call(Observe(), LONG)
                running_now = {each.name for each in status.operations if each.running}

    asyncio.run(look())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_lets_the_running_step_end_and_names_the_last_checkpoint(
    number: int, tmp_path: Path
) -> None:
    with running(
        "serve", "mock", "--port", "0", "--checkpoint-dir", str(tmp_path), *SLOW
    ) as process:
        url = address(process)
        session = connect(url)
        session.training.save("first").result()
        first = session.training.forward_backward(BATCH, losses.CrossEntropy())
        behind = session.training.optim_step(AdamW(lr=0.1))
        until_running(url, "forward_backward")
        process.send_signal(number)
        assert first.result(timeout=PATIENCE).version == 0
        with pytest.raises(RunLostError, match=r"stopped by its operator.*'first'") as caught:
            behind.result(timeout=PATIENCE)
        assert caught.value.details["last_checkpoint"] == "first"
        out, err = process.communicate(timeout=PATIENCE)
        assert (process.returncode, out) == (0, ""), err
        assert "Traceback" not in err
        session.detach()


def test_a_generate_that_outlasts_the_grace_gives_what_it_has() -> None:
    with running("serve", "mock", "--port", "0", "--grace", "0.2", *SLOW) as process:
        session = connect(address(process))
        waiting = session.sampling.generate([[1]], SamplingParams(max_tokens=4))
        session.weights.version().result()
        code, _, err = stop(process)
        assert code == 0, err
        assert "Traceback" not in err
        assert waiting.result(timeout=PATIENCE)[0][0].finish_reason == "abort"
        with pytest.raises((RunLostError, UnreachableError)):
            session.weights.version().result(timeout=PATIENCE)
        session.detach()


def test_a_second_interrupt_cuts_the_stop_short() -> None:
    with running("serve", "mock", "--port", "0", "--grace", "1000", *SLOW) as process:
        session = connect(address(process))
        session.sampling.generate([[1]], SamplingParams(max_tokens=4))
        session.weights.version().result()
        process.send_signal(signal.SIGINT)
        line_with(process.stderr, "stopping")
        time.sleep(1.2)  # one that comes within a second is the same one, passed on
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 130
        assert "Traceback" not in err
        session.detach()


def lost_run(*arguments: str) -> tuple[str, ...]:
    fault = '[{"operation": "optim_step", "error": "RunLostError"}]'
    return ("serve", "mock", "--port", "0", "--set", f"faults={fault}", *arguments)


def test_a_lost_run_is_told_to_everyone_who_asks() -> None:
    with running(*lost_run("--lease", "60")) as process:
        url = address(process)
        session = connect(url)
        session.training.forward_backward(BATCH, losses.CrossEntropy())
        with pytest.raises(RunLostError):
            session.training.optim_step(AdamW(lr=0.1)).result()
        with pytest.raises(RunLostError):
            connect(url)
        with pytest.raises(urllib.error.HTTPError) as answer:
            urllib.request.urlopen(f"{url}/healthz", timeout=PATIENCE)
        assert answer.value.code == 503
        assert json.load(answer.value)["status"] == "lost"
        answer.value.close()
        assert "LOST" in remote_rl("info", url).stdout
        assert "LOST" in remote_rl("top", url, "--once").stdout
        code, _, _ = stop(process)  # nobody has to wait for the leases
        assert code == 1
        session.detach()


def test_a_lost_run_ends_the_server_with_code_1_once_its_clients_were_told() -> None:
    with running(*lost_run("--lease", "2")) as process:
        session = connect(address(process))
        session.training.forward_backward(BATCH, losses.CrossEntropy())
        with pytest.raises(RunLostError):
            session.training.optim_step(AdamW(lr=0.1)).result()
        out, err = process.communicate(timeout=PATIENCE)
        assert (process.returncode, out) == (1, "")
        assert "Traceback" not in err
        assert err.splitlines()[-1].startswith("remote-rl: RunLostError: ")
        session.detach()


def test_a_lost_run_without_clients_ends_the_server_at_once() -> None:
    with running(*lost_run("--lease", "1000")) as process:
        session = connect(address(process))
        session.training.forward_backward(BATCH, losses.CrossEntropy()).result()
        step = session.training.optim_step(AdamW(lr=0.1))
        try:
            session.detach()
        except RunLostError:
            pass
        assert step.done()
        process.send_signal(signal.SIGTERM)  # of no use where it has ended, no harm either
        process.communicate(timeout=PATIENCE)
        assert process.returncode == 1


def test_a_secret_that_everybody_may_read_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from remote_rl.commands.values import read_token

    token = tmp_path / "token"
    token.write_text("s3cret\n")
    token.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        assert read_token(str(token)) == "s3cret"
    assert "chmod 600" in caplog.text
    assert "s3cret" not in caplog.text
    caplog.clear()
    token.chmod(0o640)  # a group of its own is a choice
    assert read_token(str(token)) == "s3cret"
    assert not caplog.records
