"""`remote-rl` as users run it: in a process of its own, stopped by a signal."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_support import PATIENCE, address, line_of, line_with, remote_rl, running, stop, trained
from lossy_proxy import lossy

from remote_rl import __version__, connect


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with running("serve", "mock", "--port", "0", "--set", "seed=3") as process:
        yield address(process)
        code, out, err = stop(process)
    assert code == 0, err
    assert out == ""
    assert "Traceback" not in err
    assert "\r" not in err  # progress is for terminals


def test_it_teaches_when_asked() -> None:
    assert remote_rl("--version").stdout == f"remote-rl {__version__}\n"
    whole = remote_rl("--help")
    assert whole.returncode == 0
    assert "remote-rl serve mock" in whole.stdout
    assert "connect(" in whole.stdout
    assert "--token-file" in remote_rl("serve", "--help").stdout
    assert "--json" in remote_rl("info", "--help").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "COMMAND"),
        (("sreve",), "serve"),
        (("serve",), "backend"),
        (("serve", "mock", "--prot", "1"), "--prot"),
        (("serve", "mock", "--max-body", "big"), "--max-body"),
        (("serve", "mokc"), "'mock'"),
        (("serve", "mock", "--set", "vocab_sise=300"), "vocab_size"),
        (("serve", "mock", "--set", "vocab_size"), "NAME=VALUE"),
        (("serve", "mock", "--set", "latency={"), "JSON"),
        (("serve", "mock", "--config", "no-such.toml"), "no-such.toml"),
        (("serve", "mock", "--token-file", "no-such-file"), "no-such-file"),
        (("serve", "mock", "--host", "0.0.0.0"), "--token-file"),
        (("serve", "mock", "--host", "::"), "--token-file"),
        (("serve", "mock", "--host", "no such host"), "no such host"),
        (("serve", "mock", "--port", "99999"), "0 to 65535"),
        (("serve", "mock", "--port", "-1"), "--port"),
        (("serve", "mock", "--port", "http"), "'http' is no port"),
        (("serve", "mock", "--port", "1", "--port", "2"), "--port: given twice"),
        (("serve", "mock", "--config", "a.toml", "--config", "b.toml"), "--config: given twice"),
        (("serve", "mock", "--set", "seed=1", "--set", "seed=2"), "seed is given twice"),
        (("serve", "mock", "--config", "/"), "can't be read"),
        (("serve", "mock", "--token-file", "/"), "can't be read"),
        (("serve", "mock", "--token-file", "/dev/null"), "printable ASCII"),
        (("serve", "mock", "--grace", "-1"), "'-1' is no number of seconds"),
        (("serve", "mock", "--lease", "0"), "more than 0"),
        (("serve", "mock", "--io-timeout", "nan"), "'nan' is no number of seconds"),
        (("serve", "mock", "--budget", "0"), "'0' is no size"),
        (("serve", "mock", "--log-format", "xml"), "--log-format"),
        (("serve", "mock", "--checkpoint-dir", "/dev/null"), "/dev/null"),
        (("top", "gpu-box:7700"), "http://"),
        (("top", "http://127.0.0.1:1", "--interval", "0"), "more than 0"),
        (("serve", "mock", "--tls-key", "key.pem"), "certificate"),
        (("serve", "mock", "--tls-cert", "no-such.pem"), "no-such.pem"),
        (("info", "gpu-box:7700"), "http://"),
    ],
)
def test_wrong_usage_is_code_2_with_a_sentence(
    arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REMOTE_RL_TOKEN", raising=False)
    result = remote_rl(*arguments)
    assert result.returncode == 2, result
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_debug_shows_the_traceback() -> None:
    result = remote_rl("serve", "mokc", "--debug")
    assert result.returncode == 1
    assert "Traceback" in result.stderr


def test_a_taken_port_is_said_before_the_backend_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = remote_rl("serve", "mock", "--port", port, "--set", "latency=1000")
    assert result.returncode == 2
    assert f"port {port}" in result.stderr


def test_a_backend_that_does_not_start_is_code_1() -> None:
    fault = '[{"operation": "start", "error": "BackendError"}]'
    result = remote_rl("serve", "mock", "--port", "0", "--set", f"faults={fault}")
    assert result.returncode == 1
    assert "BackendError" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_with_code_0(number: int) -> None:
    with running("serve", "mock", "--port", "0") as process:
        address(process)
        code, out, err = stop(process, number)
    assert (code, out) == (0, ""), err
    assert "Traceback" not in err


def test_a_signal_that_comes_twice_is_one() -> None:
    with running("serve", "mock", "--port", "0") as process:
        port = int(address(process).rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port), PATIENCE) as unfinished:
            unfinished.sendall(
                b"POST /v1/renew HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
                b"Content-Type: application/x-remote-rl-frame\r\nContent-Length: 9\r\n\r\n"
            )
            assert unfinished.recv(100).startswith(b"HTTP/1.1 100")  # it holds the stop up
            process.send_signal(signal.SIGTERM)
            line_with(process.stderr, "stopping")
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (0, ""), err
    assert "Traceback" not in err


def test_a_signal_ends_a_long_start() -> None:
    with running("serve", "mock", "--port", "0", "--set", 'latency={"start": 1000}') as process:
        assert "starting mock" in line_of(process.stderr)
        code, out, err = stop(process)
    assert (code, out) == (0, ""), err
    assert "Traceback" not in err


def test_info_says_what_runs(server: str) -> None:
    result = remote_rl("info", server)
    assert result.returncode == 0, result.stderr
    rows = dict(line.split("  ", 1) for line in result.stdout.splitlines())
    assert rows["backend"].strip() == "mock"
    assert "PPO" in rows["losses"]
    data = json.loads(remote_rl("info", server, "--json").stdout)
    assert data["backend"] == "mock"
    assert "logprobs" in data["capabilities"]["outputs"]


def test_info_of_nothing_is_code_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    result = remote_rl("info", f"http://127.0.0.1:{port}")
    assert result.returncode == 1
    assert "UnreachableError" in result.stderr
    assert "Traceback" not in result.stderr


def test_configuration_comes_from_a_file_and_from_arguments(tmp_path: Path) -> None:
    (tmp_path / "mock.toml").write_text("vocab_size = 300\nseed = 5\n")
    arguments = ("--config", str(tmp_path / "mock.toml"), "--set", "vocab_size=310")
    with running("serve", "mock", "--port", "0", *arguments) as process:
        data = json.loads(remote_rl("info", address(process), "--json").stdout)
        assert stop(process)[0] == 0
    assert data["model"]["vocab_size"] == 310


def test_a_server_with_a_token_answers_whoever_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REMOTE_RL_TOKEN", raising=False)
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    with running("serve", "mock", "--port", "0", "--token-file", str(token)) as process:
        url = address(process)
        refused = remote_rl("info", url)
        assert refused.returncode == 1
        assert "AuthenticationError" in refused.stderr
        assert remote_rl("info", url, "--token-file", str(token)).returncode == 0
        monkeypatch.setenv("REMOTE_RL_TOKEN", "s3cret")
        assert remote_rl("info", url).returncode == 0
        with connect(url, token="s3cret") as session:
            assert session.weights.version().result().trainer == 0
        code, _, err = stop(process)
    assert code == 0
    assert "s3cret" not in err


def test_a_run_over_http_gives_the_bits_of_a_run_in_process(server: str) -> None:
    assert trained(server) == trained("mock", seed=3)


@pytest.mark.parametrize(("seed", "most_bytes"), [(0, 2_000), (1, 8_000), (2, 8_000)])
def test_a_line_that_breaks_all_the_time_changes_no_bit(seed: int, most_bytes: int) -> None:
    with running("serve", "mock", "--port", "0", "--set", "seed=3") as process:
        with lossy(address(process), seed, most_bytes) as (url, proxy):
            given = trained(url)
        assert proxy.cuts > 3
        code, _, err = stop(process)
    assert code == 0
    assert "Traceback" not in err
    assert given == trained("mock", seed=3)
