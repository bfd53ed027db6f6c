"""Runs and leases: who drives, how a run begins, who waits and who is refused."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
from client_server import Server
from client_support import ServerFactory, learn, logprobs, small_mock

from remote_rl import AdamW, Batch, SamplingParams, connect, losses
from remote_rl.errors import (
    ConflictError,
    InvalidRequestError,
    LeaseError,
)
from remote_rl.messages import Attach, Grant
from remote_rl.protocol import PROTOCOL_VERSIONS


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
