"""`remote-rl` with actors: serve, info, top, conformance; and the whole suite."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import ray
from command_support import line_of, remote_rl, running, stop
from process_support import until
from ray_support import RayServer

from remote_rl import SamplingParams, connect
from remote_rl.errors import RunLostError, UnreachableError
from remote_rl.testing.conformance.runner import Target, run
from remote_rl.transports.ray_cluster import NAMESPACE

LINE = re.compile(r'remote_rl: serving mock at (ray:\S+) - connect\("\1"\)\n')


def fresh() -> str:
    return f"run-{os.getpid()}-{secrets.token_hex(4)}"


def announced(process: subprocess.Popen[str]) -> str:
    """Where it says that it serves."""
    line = line_of(process.stdout)
    match = LINE.fullmatch(line)
    assert match, line or process.communicate()[1]
    return match[1]


def is_gone(name: str) -> bool:
    """Whether no actor has the name any more."""
    try:
        ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return True
    return False


@pytest.fixture(autouse=True)
def joined(cluster: Any) -> None:
    """This process is in the cluster."""
    ray.init(address=cluster.address, ignore_reinit_error=True, log_to_driver=False)


def test_serve_until_a_signal(tmp_path: Path) -> None:
    name = fresh()
    slow = "--set", 'latency={"token": 60.0}'
    with running(
        *("serve", "mock", "--ray-name", name, "--grace", "0.2", *slow),
        *("--checkpoint-dir", str(tmp_path / "run")),
    ) as process:
        assert announced(process) == f"ray:{name}"
        session = connect(f"ray:{name}")
        session.training.save("kept").result()
        assert (tmp_path / "run" / "checkpoints" / "kept").is_dir()
        drawn = session.sampling.generate([[1]], SamplingParams(max_tokens=9))
        assert session.info().result().checkpoint_dir
        code, out, err = stop(process)
        assert (code, out) == (0, "")
        assert "Traceback" not in err
        assert drawn.result(60)[0].samples[0].finish_reason == "abort"
        with pytest.raises((RunLostError, UnreachableError)):
            session.training.zero_grad().result(60)
        session.detach()
    until("the actor is gone", lambda: is_gone(name))


def test_an_actor_ends_with_the_process_that_serves_it() -> None:
    name = fresh()
    with running("serve", "mock", "--ray-name", name) as process:
        announced(process)
        session = connect(f"ray:{name}")
        process.send_signal(signal.SIGKILL)
        until("it has noticed", lambda: session._connection.broken is not None)
        assert isinstance(session._connection.broken, UnreachableError)
        session.detach()
    until("the actor is gone", lambda: is_gone(name))


def test_a_server_whose_actor_dies_ends_with_code_1() -> None:
    name = fresh()
    with running("serve", "mock", "--ray-name", name) as process:
        announced(process)
        ray.kill(ray.get_actor(name, namespace=NAMESPACE))
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert f"RunLostError: the actor at ray:{name} has died" in err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--ray-name", "a", "--port", "0"), 2, "--port is for HTTP"),
        (("--ray-name", "a", "--token-file", "x"), 2, "--token-file is for HTTP"),
        (("--ray-namespace", "a"), 2, "--ray-namespace is for an actor"),
        (("--ray-name", "a/b"), 2, "letters, digits"),
        (("--ray-name", "a", "--set", "vocab=3"), 2, "vocab_size"),
        (("--ray-name", "a", "--ray-address", "127.0.0.1:1"), 1, "no Ray cluster answers"),
    ],
)
def test_what_serve_refuses(arguments: tuple[str, ...], code: int, said: str) -> None:
    done = remote_rl("serve", "mock", *arguments)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_info_and_top_say_what_runs(server: RayServer) -> None:
    done = remote_rl("info", server.target)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^backend +mock$", done.stdout, re.MULTILINE)
    done = remote_rl("top", server.target, "--once")
    assert done.returncode == 0, done.stderr
    assert f"server     {server.target}  mock" in done.stdout
    done = remote_rl("info", "ray:nobody")
    assert done.returncode == 1
    assert "no actor 'nobody'" in done.stderr


# -- conformance ----------------------------------------------------------------------------------


def test_the_mock_passes_conformance_from_another_process_than_the_actor_s(
    serve: Any, tmp_path: Path
) -> None:
    session = connect(serve(checkpoint_dir=tmp_path).target)
    try:
        reports = run(Target(session=session, tolerance=1e-5, learning_rate=1e-2))
    finally:
        session.detach()
    assert [report.name for report in reports if report.verdict == "failed"] == []
    assert len([report for report in reports if report.verdict == "passed"]) > 100


def test_the_command_runs_it(serve: Any) -> None:
    server = serve()
    done = remote_rl("conformance", server.target)
    assert done.returncode == 2
    assert "--destructive" in done.stderr
    chosen = ("--area", "Pushes", "--area", "Optimizer")
    done = remote_rl("conformance", server.target, "--destructive", *chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failed" in done.stdout
    assert done.stdout.startswith("conformance of mock: ")
