"""The log of a server: one JSON object a line, and never a secret or what was sent."""

from __future__ import annotations

import datetime
import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from command_support import PATIENCE, address, remote_rl, running, stop
from http_support import frame_bytes, in_loop, post
from run_support import served

from remote_rl import AdamW, Batch, SamplingParams, connect, errors, losses
from remote_rl.commands.logs import JsonFormatter
from remote_rl.messages import Renew

TOKEN = "s3cret-of-the-server"
#: ids that occur nowhere but in prompts and responses
FIRST_ID = 91200
OWN_ID = re.compile(r"\b912\d\d(\d{3})?\b")


def formatted(record: logging.LogRecord) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(JsonFormatter().format(record))
    return line


def test_a_line_has_its_time_in_utc_and_its_fields_apart() -> None:
    record = logging.makeLogRecord(
        {
            "name": "remote_rl.x",
            "levelname": "WARNING",
            "msg": "%s of %d",
            "args": ("one", 2),
            "created": 0.25,
            "operation": "sync",
            "seconds": 0.5,
            "odd": Path("/x"),
        }
    )
    assert formatted(record) == {
        "time": "1970-01-01T00:00:00.250Z",
        "level": "warning",
        "logger": "remote_rl.x",
        "message": "one of 2",
        "operation": "sync",
        "seconds": 0.5,
        "odd": repr(Path("/x")),
    }


def test_a_traceback_is_a_field_and_not_a_second_line() -> None:
    try:
        raise KeyError("a bug")
    except KeyError:
        record = logging.makeLogRecord({"msg": "failed", "exc_info": sys.exc_info()})
    text = JsonFormatter().format(record)
    assert "\n" not in text
    assert "KeyError: 'a bug'" in json.loads(text)["traceback"]


def of(lines: list[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    return [one for one in lines if all(one.get(key) == value for key, value in fields.items())]


def test_a_server_logs_what_happens_and_never_a_token_or_a_prompt(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    arguments = (
        *("serve", "mock", "--port", "0", "--token-file", str(token), "--lease", "1000"),
        *("--log-format", "json", "--log-level", "debug"),
        *("--set", "vocab_size=100000", "--set", "embedding_size=2", "--set", "hidden_size=2"),
        *("--set", 'faults=[{"operation": "forward", "error": "BackendError"}]'),
    )
    prompts = [[FIRST_ID, FIRST_ID + 1], [FIRST_ID + 2]]
    batch = Batch(
        prompts=prompts, prompt_index=[0, 1], responses=[[FIRST_ID + 3]] * 2, temperature=1.0
    )
    with running(*arguments) as process:
        url = address(process)
        with pytest.raises(errors.AuthenticationError):
            connect(url, token="wrong-" + TOKEN)
        with connect(url, token=TOKEN) as session:
            stop_ids = SamplingParams(max_tokens=2, stop_token_ids=(FIRST_ID + 4,))
            session.sampling.generate(prompts, stop_ids).result()
            with pytest.raises(errors.InvalidRequestError, match="91299999"):
                session.sampling.generate([[91299999]], stop_ids).result()
            with pytest.raises(errors.BackendError):
                session.training.forward(batch).result()
            session.training.forward_backward(batch, losses.CrossEntropy()).result()
            session.training.optim_step(AdamW(lr=0.1)).result()
            with pytest.raises(errors.ConflictError):
                session.training.optim_step(AdamW(lr=0.1)).result()
            session.weights.sync(label=f"label-{TOKEN}").result()
        code, _, err = stop(process)
    assert code == 0
    assert TOKEN not in err
    lines: list[dict[str, Any]] = [json.loads(line) for line in err.splitlines()]
    for line in lines:
        assert set(line) >= {"time", "level", "logger", "message"}
        datetime.datetime.strptime(line["time"], "%Y-%m-%dT%H:%M:%S.%fZ")
        assert not OWN_ID.search(json.dumps({**line, "seconds": 0}))
    (joined,) = of(lines, event="attached", role="driver")
    (left,) = of(lines, event="ended", client=joined["client"])
    assert (joined["epoch"], left["epoch"]) == (1, 1)
    assert left["reason"] == "it detached"
    (step,) = of(lines, operation="optim_step", level="info")
    assert (step["client"], step["stream"], step["version"]) == (joined["client"], "training", 1)
    assert step["request_id"] == f"{joined['client']}:training:{step['number']}"
    assert step["seconds"] >= 0
    assert [one["error"] for one in of(lines, operation="optim_step", level="warning")] == [
        "ConflictError"
    ]
    assert [one["error"] for one in of(lines, operation="forward")] == ["BackendError"]
    assert len(of(lines, operation="sync", level="info")) == 1
    assert of(lines, operation="generate", level="debug")


@in_loop
async def test_an_engines_own_failure_is_logged_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served() as run:
        await run.attach()

        async def fail(request: Any, context: Any) -> None:
            raise ZeroDivisionError("in the engine")

        run.dispatcher.backend.training.zero_grad = fail  # type: ignore[method-assign]
        assert isinstance((await run.ask("zero_grad", 1)).error, errors.BackendError)
    (line,) = [formatted(one) for one in caplog.records if one.levelno == logging.ERROR]
    assert "ZeroDivisionError: in the engine" in line["traceback"]


@pytest.mark.parametrize(
    "path",
    ["/metrics?token=noise-91200", "/v1/noise-91200", "/noise-91200", "/healthz?noise-91200"],
)
@pytest.mark.parametrize("method", ["GET", "POST", "NOISE-91200"])
@in_loop
async def test_a_secret_in_an_address_or_a_header_is_not_logged(
    path: str, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Not by the lines for each request either."""
    caplog.set_level(logging.DEBUG)
    async with served() as run, aiohttp.ClientSession() as session:
        headers = {"Referer": f"{run.url}/noise-91200", "User-Agent": "noise-91200"}
        async with session.request(method, run.url + path, headers=headers):
            pass
    (line,) = [one for one in caplog.records if one.name == "remote_rl.server.access"]
    known = path.partition("?")[0] if "?" in path else "other"
    assert formatted(line)["path"] in (known, "other")  # a method may be unknown to the parser, too
    assert formatted(line)["path"] == known or method == "NOISE-91200"
    own = [one for one in caplog.records if one.name.startswith("remote_rl.")]
    assert not [one for one in own if "noise" in JsonFormatter().format(one).lower()]


@pytest.mark.parametrize("debug", [(), ("--debug",)])
@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (("serve", "mock", "--port", "0", "--set", "sed=1"), 2, "UnknownNameError"),
        (("serve", "mock", "--token-file", "nowhere/at-all"), 2, "InvalidRequestError"),
        (("serve", "mcok", "--port", "0"), 2, "UnknownNameError"),
        (("info", "http://127.0.0.1:1"), 1, "UnreachableError"),
    ],
)
def test_the_line_that_a_failure_ends_with_is_json_too(
    arguments: tuple[str, ...], code: int, error: str, debug: tuple[str, ...]
) -> None:
    ended = remote_rl(*arguments, "--log-format", "json", *debug)
    assert ended.returncode == code, ended.stderr
    lines = [json.loads(line) for line in ended.stderr.splitlines()]
    assert (lines[-1]["level"], lines[-1]["logger"]) == ("error", "remote_rl.cli")
    assert lines[-1]["error"] == error
    assert lines[-1]["message"]
    assert ("traceback" in lines[-1]) == bool(debug)


def test_a_lost_run_ends_its_log_with_json() -> None:
    """The line that says why the server is gone, and after what."""
    fault = 'faults=[{"operation": "sync", "error": "RunLostError"}]'
    with running(
        *("serve", "mock", "--port", "0", "--lease", "1", "--set", fault),
        *("--log-format", "json", "--log-level", "error"),
    ) as process:
        session = connect(address(process))
        with pytest.raises(errors.RunLostError):
            session.weights.sync().result()
        _, err = process.communicate(timeout=PATIENCE)
        session.detach()
    assert process.returncode == 1
    lines = [json.loads(line) for line in err.splitlines()]
    assert (lines[-1]["logger"], lines[-1]["error"]) == ("remote_rl.cli", "RunLostError")


@in_loop
async def test_what_a_stranger_sends_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with served() as run:
        for body in (b"noise-91200", frame_bytes(Renew(client_id="noise-91200", instance_id="i"))):
            await post(run.url, body=body)
        await post(run.url, path="/v1/noise-91200?token=noise-91200")
    own = [one for one in caplog.records if one.name.startswith("remote_rl.")]
    assert not [one for one in own if "noise" in str(one) or "noise" in one.getMessage()]
