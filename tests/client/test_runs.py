"""Runs and leases: who drives, how a run begins, who waits and who is refused."""

from __future__ import annotations

import logging
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from client_server import Server
from conftest import ServerFactory, learn, logprobs, small_mock

from remote_rl import AdamW, Batch, SamplingParams, connect, losses
from remote_rl.errors import (
    ConflictError,
    InvalidRequestError,
    LeaseError,
    RunLostError,
    UnreachableError,
)
from remote_rl.messages import Attach, ConnectionLost, Grant
from remote_rl.protocol import PROTOCOL_VERSIONS
from remote_rl.transports.http import HttpTransport


@pytest.fixture
def server(servers: ServerFactory, tmp_path: Path) -> Server:
    return servers(small_mock(), checkpoint_dir=tmp_path / "run")


@pytest.fixture
def trained(server: Server, batch: Batch) -> list[list[float]]:
    """The logprobs of a run that somebody trained, saved ("one", "two") and left."""
    seen: list[list[float]] = []
    with connect(server.url) as rl:
        for name in ("one", "two"):
            learn(rl, batch)
            seen.append(logprobs(rl, batch))
            rl.training.save(name).result()
        learn(rl, batch)
        rl.weights.sync().result()
        seen.append(logprobs(rl, batch))
    return seen


# -- how a run begins -----------------------------------------------------------------------------


def test_a_pristine_run_needs_no_start(server: Server, batch: Batch) -> None:
    for _ in range(2):  # using it without changing it leaves it pristine
        with connect(server.url) as rl:
            assert rl.info().result().pristine
            logprobs(rl, batch)
            rl.sampling.generate([[1]], SamplingParams(max_tokens=1)).result()
    with connect(server.url, start="base") as rl:
        assert rl.info().result().pristine


def test_a_run_that_is_not_needs_one(server: Server, trained: Any) -> None:
    with pytest.raises(InvalidRequestError, match="start='base', start='current' or the name"):
        connect(server.url)
    assert not server.dispatcher.info().driver  # whoever was refused holds nothing


def test_start_current_goes_on(server: Server, trained: Any, batch: Batch) -> None:
    with connect(server.url, start="current") as rl:
        assert logprobs(rl, batch) == trained[2]
        assert rl.weights.version().result().trainer == 3


def test_start_base_is_a_new_run(server: Server, trained: Any, batch: Batch) -> None:
    with connect(server.url, start="base") as rl:
        assert rl.info().result().pristine
        held = rl.weights.version().result()
        assert held.trainer == held.sampler == 4  # a version never repeats
        fresh = connect(small_mock())
        assert logprobs(rl, batch) == logprobs(fresh, batch)
        fresh.close()


@pytest.mark.parametrize(("name", "which"), [("one", 0), ("two", 1)])
def test_start_at_a_checkpoint(
    name: str, which: int, server: Server, trained: Any, batch: Batch
) -> None:
    with connect(server.url, start=name) as rl:
        assert logprobs(rl, batch) == trained[which]
        assert rl.weights.version().result().trainer == 4


def test_a_start_that_is_none(server: Server, trained: Any) -> None:
    with pytest.raises(InvalidRequestError, match="no checkpoint 'onne'; did you mean 'one'"):
        connect(server.url, start="onne")
    with pytest.raises(InvalidRequestError, match="start must be 'base', 'current' or"):
        connect(server.url, start="reference")
    assert not server.dispatcher.info().driver


def test_a_run_in_this_process_can_start_at_a_checkpoint(
    server: Server, trained: Any, batch: Batch, tmp_path: Path
) -> None:
    with connect(small_mock(), checkpoint_dir=tmp_path / "run", start="one") as rl:
        assert logprobs(rl, batch) == trained[0]


def test_an_earlier_drivers_gradient_is_not_the_next_ones(server: Server, batch: Batch) -> None:
    with connect(server.url) as rl:
        rl.training.forward_backward(batch, losses.CrossEntropy())
    with (
        connect(server.url, start="current") as rl,
        pytest.raises(ConflictError, match="nothing was accumulated"),
    ):
        rl.training.optim_step(AdamW(lr=0.1)).result()


def test_another_model_is_refused(server: Server) -> None:
    for target in (server.url, small_mock()):
        with pytest.raises(InvalidRequestError, match="the run's model is 'mock', not 'qwen'"):
            connect(target, model="qwen")
        connect(target, model="mock").close()


# -- one driver at a time -------------------------------------------------------------------------


def test_a_second_driver_is_refused_while_the_first_is_alive(servers: ServerFactory) -> None:
    server = servers(small_mock(), lease_seconds=1.0)
    with connect(server.url) as first:
        with pytest.raises(LeaseError, match="is alive; end it, or connect with takeover=True"):
            connect(server.url)
        assert first.info().result().driver
    with connect(server.url) as second:
        assert second.role == "driver"


def test_it_waits_for_a_silent_ones_lease_and_says_so(
    servers: ServerFactory, caplog: pytest.LogCaptureFixture
) -> None:
    server = servers(small_mock(), lease_seconds=0.6)
    gone = Attach(client_id="gone", protocol_versions=PROTOCOL_VERSIONS)
    assert isinstance(server.run(server.dispatcher.handle(gone)), Grant)
    begin = time.monotonic()
    with caplog.at_level(logging.WARNING, "remote_rl.client"), connect(server.url) as rl:
        assert time.monotonic() - begin >= 0.3
        assert rl.handle().epoch == 2
    assert f"another driver holds {server.url}; waiting up to 1 s" in caplog.text


def test_takeover_revokes(server: Server, batch: Batch) -> None:
    first = connect(server.url)
    learn(first, batch)
    with connect(server.url, takeover=True, start="current") as second:
        assert second.role == "driver"
        with pytest.raises(LeaseError, match="another client took the run over"):
            first.weights.version().result()
        with pytest.raises(LeaseError):  # and from then on at the call
            first.weights.version()
        learn(second, batch)
        assert second.weights.version().result().trainer == 2
    first.detach()


def test_what_was_queued_ends_with_its_driver(
    server: Server, batch: Batch, double: Any, servers: ServerFactory
) -> None:
    server = servers(double)
    hold = double.hold("forward")
    first = connect(server.url)
    running = first.training.forward(batch)
    queued = first.training.snapshot("never")
    assert hold.reached.wait(60)
    with connect(server.url, takeover=True) as second:
        with pytest.raises(LeaseError):
            queued.result(60)
        hold.open()
        second.training.snapshot("mine").result(60)
    with pytest.raises(LeaseError):
        running.result(60)
    assert double.log[1:] == [("snapshot", "mine")]
    first.detach()


def test_closing_leaves_a_servers_run(server: Server, batch: Batch) -> None:
    with connect(server.url) as rl:
        instance = rl.info().result().instance_id
        assert rl.info().result().driver
        learn(rl, batch)
    assert not server.dispatcher.info().driver
    with connect(server.url, start="current") as rl:
        assert rl.info().result().instance_id == instance
        assert rl.weights.version().result().trainer == 1


# -- when the server is not there -----------------------------------------------------------------


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


def test_a_server_that_stays_away_is_unreachable_a_leases_length_later(
    servers: ServerFactory, batch: Batch, caplog: pytest.LogCaptureFixture
) -> None:
    server = servers(small_mock(), lease_seconds=0.8)
    rl = connect(server.url)
    server.stop(quietly=True)
    operation = rl.training.forward(batch)
    with pytest.raises(UnreachableError, match="lease has ended"):
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
