"""Addresses where nothing answers, servers that restart, stay away or are closed."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest
from client_server import Server
from client_support import ServerFactory, learn, small_mock

from remote_rl import Batch, connect
from remote_rl.errors import InvalidRequestError, RunLostError, UnreachableError
from remote_rl.messages import ConnectionLost
from remote_rl.transports.http import HttpTransport


@pytest.fixture
def server(servers: ServerFactory, tmp_path: Path) -> Server:
    return servers(small_mock(), checkpoint_dir=tmp_path / "run")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_an_address_where_nothing_answers_is_named_in_about_five_seconds() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    begin = time.monotonic()
    with pytest.raises(UnreachableError, match=f"nothing answers at {url}") as caught:
        connect(url)
    assert 4 < time.monotonic() - begin < 8
    assert isinstance(caught.value, ConnectionError)
    assert "remote-rl serve" in str(caught.value)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("ftp://host", "unknown scheme"),
        ("http://", "write http://HOST:PORT"),
        ("http://user:pw@host", "no user, query or fragment"),
        ("http://h:port", "not an address"),
        ("gpu-box:7700", "did you mean 'http://gpu-box:7700'"),
        ("mock/", "did you mean 'http://mock/'"),
        (None, "a target is a backend's name"),
        (7700, "a target is a backend's name"),
    ],
)
def test_what_is_no_target(target: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        connect(target)


def test_a_restarted_server_is_another_run(
    server: Server, batch: Batch, servers: ServerFactory, tmp_path: Path
) -> None:
    rl = connect(server.url)
    handle = rl.handle()
    learn(rl, batch)
    rl.training.save("last").result()
    server.stop(quietly=True)
    again = servers(small_mock(), checkpoint_dir=tmp_path / "run", port=server.port)
    with pytest.raises(RunLostError, match=r"restarted.*start= 'last', its last") as caught:
        rl.weights.version().result(60)
    assert caught.value.details["last_checkpoint"] == "last"
    with pytest.raises(RunLostError):  # and never fresh weights under the old name
        rl.training.forward(batch)
    rl.detach()
    with pytest.raises(RunLostError, match="the handle is of a run that is gone"):
        connect(handle)
    with connect(again.url, start="last") as resumed:
        assert resumed.weights.version().result().trainer == 2


def test_a_restarted_server_without_checkpoints_says_so(
    servers: ServerFactory, batch: Batch
) -> None:
    server = servers(small_mock())
    rl = connect(server.url)
    server.stop(quietly=True)
    servers(small_mock(), port=server.port)
    with pytest.raises(RunLostError, match="start= 'base'") as caught:
        rl.info().result(60)
    assert caught.value.details["last_checkpoint"] is None
    rl.detach()


def test_a_server_that_stays_away_has_ended(servers: ServerFactory, batch: Batch) -> None:
    """Nothing listens there for 10 s, or for a lease's length where that is less."""
    server = servers(small_mock(), lease_seconds=0.8)
    rl = connect(server.url)
    server.stop(quietly=True)
    operation = rl.training.forward(batch)
    with pytest.raises(UnreachableError, match=r"nothing listens at .*: its server has ended"):
        operation.result(60)
    with pytest.raises(UnreachableError):
        rl.info()
    rl.detach()


def test_silence_is_counted_from_the_last_answer(
    servers: ServerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session older than its lease survives a lost message, since it spoke a moment ago."""
    server = servers(small_mock(), lease_seconds=0.5)
    with connect(server.url) as rl:
        begin = time.monotonic()
        while time.monotonic() - begin < 0.7:
            rl.info().result()
        original, lost = HttpTransport.call, []

        async def call(self: Any, message: Any, timeout: float) -> Any:
            if not lost:
                lost.append(message)
                raise ConnectionLost("the first one of all")
            return await original(self, message, timeout)

        monkeypatch.setattr(HttpTransport, "call", call)
        rl.info().result(60)
        assert len(lost) == 1


def test_a_run_that_is_closed_says_so(server: Server) -> None:
    rl = connect(server.url)
    server.run(server.dispatcher.close())
    with pytest.raises(RunLostError, match="the run was closed"):
        rl.info().result(60)
    rl.detach()
