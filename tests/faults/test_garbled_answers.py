"""Answers that something between client and run replaced: what the run has done counts, and its
caller is never told that it failed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from faults_support import BATCHES, LOSS, PATIENCE, small_mock

from remote_rl import AdamW, SamplingParams, connect
from remote_rl.errors import (
    AuthenticationError,
    InvalidRequestError,
    ProtocolError,
    RemoteRLError,
    UnreachableError,
)
from remote_rl.messages import Cancel, ConnectionLost, Message, Submit, Transport, Waited
from remote_rl.requests import Request
from remote_rl.testing import LoopbackServer


class Garbling:
    """Once, lets an operation through (or, with `reach=False`, keeps it back) and raises `error`
    in the place of its answer; with `cancels` of its cancel's, too."""

    def __init__(
        self, operation: str, error: RemoteRLError, *, reach: bool = True, cancels: bool = False
    ) -> None:
        self.operation, self.error, self.reach, self.cancels = operation, error, reach, cancels
        self.times = 1

    def wrap(self, inner: Transport) -> Transport:
        self.inner = inner
        return self

    @property
    def target(self) -> str:
        return self.inner.target

    @property
    def submits(self) -> int:
        return self.inner.submits

    def digest(self, request: Request) -> Any:
        return self.inner.digest(request)

    async def close(self) -> None:
        await self.inner.close()

    async def call(self, message: Message, timeout: float) -> Any:
        if isinstance(message, Cancel) and self.cancels:
            raise self.error
        chosen = isinstance(message, Submit) and message.operation == self.operation
        if not chosen or not self.times:
            return await self.inner.call(message, timeout)
        self.times -= 1
        if self.reach:
            await self.inner.call(message, timeout)
        raise self.error


ERRORS = (ProtocolError("a page of a gateway"), AuthenticationError("a gateway wants a token"))


@pytest.fixture(params=["inprocess", "http"])
def target(request: pytest.FixtureRequest) -> Any:
    if request.param == "inprocess":
        yield small_mock()
        return
    server = LoopbackServer(small_mock())
    yield server.url
    server.stop()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_forward_backward_whose_answer_is_replaced_counts_once(
    target: Any, error: RemoteRLError
) -> None:
    garbling = Garbling("forward_backward", error)
    with connect(target, wrap_transport=garbling.wrap) as rl:
        value = rl.training.forward_backward(BATCHES[0], LOSS).result(PATIENCE).value
        norm = rl.training.optim_step(AdamW(lr=0.1)).result(PATIENCE).grad_norm
    assert garbling.times == 0
    with connect(small_mock()) as clean:
        assert clean.training.forward_backward(BATCHES[0], LOSS).result().value == value
        assert clean.training.optim_step(AdamW(lr=0.1)).result().grad_norm == norm


@pytest.mark.parametrize("operation", ["optim_step", "generate", "pause", "version", "info"])
def test_so_does_any_other_operation(target: Any, operation: str) -> None:
    garbling = Garbling(operation, ProtocolError("a page of a gateway"))
    with connect(target, wrap_transport=garbling.wrap) as rl:
        rl.training.forward_backward(BATCHES[0], LOSS)
        step = rl.training.optim_step(AdamW(lr=0.1))
        assert step.result(PATIENCE).version == 1
        params = SamplingParams(max_tokens=2, seed=1)
        assert len(rl.sampling.generate([[1]], params).result(PATIENCE)) == 1
        rl.sampling.pause().result(PATIENCE)
        assert rl.info().result(PATIENCE).paused
        rl.sampling.resume().result(PATIENCE)
        assert rl.weights.version().result(PATIENCE).trainer == 1
    assert garbling.times == 0


def test_one_that_never_reached_the_run_fails_and_leaves_no_gap(target: Any) -> None:
    garbling = Garbling("forward_backward", ProtocolError("a page of a gateway"), reach=False)
    with connect(target, wrap_transport=garbling.wrap) as rl:
        with pytest.raises(ProtocolError, match="a page of a gateway"):
            rl.training.forward_backward(BATCHES[0], LOSS).result(PATIENCE)
        rl.training.zero_grad().result(PATIENCE)
        rl.training.forward_backward(BATCHES[0], LOSS)
        assert rl.training.optim_step(AdamW(lr=0.1)).result(PATIENCE).version == 1


@pytest.mark.parametrize("reach", [True, False], ids=["it counts", "it never came"])
def test_where_nobody_can_tell_the_session_ends_by_name(target: Any, reach: bool) -> None:
    error = AuthenticationError("a gateway wants a token")
    garbling = Garbling("forward_backward", error, reach=reach, cancels=True)
    rl = connect(target, wrap_transport=garbling.wrap)
    rl.training.forward_backward(BATCHES[0], LOSS)
    with pytest.raises(AuthenticationError, match="a gateway wants a token"):
        rl.training.optim_step(AdamW(lr=0.1)).result(PATIENCE)
    with pytest.raises(AuthenticationError):
        rl.training.zero_grad()
    rl.detach()


def test_a_page_of_a_gateway_in_the_middle_of_a_session_is_a_lost_message(target: Any) -> None:
    error = ProtocolError("HTTP 404, text/html", foreign=True)
    garbling = Garbling("forward_backward", error, reach=False)
    with connect(target, wrap_transport=garbling.wrap) as rl:
        rl.training.forward_backward(BATCHES[0], LOSS)
        assert rl.training.optim_step(AdamW(lr=0.1)).result(PATIENCE).version == 1


class Holding(Garbling):
    """Its operation is refused on the way; the answer to the cancel after that comes only once a
    wait has brought the tombstone that the cancel left."""

    def wrap(self, inner: Transport) -> Transport:
        self.buried = asyncio.Event()
        return super().wrap(inner)

    async def call(self, message: Message, timeout: float) -> Any:
        answer = await super().call(message, timeout)
        if isinstance(message, Cancel):
            await asyncio.wait_for(self.buried.wait(), PATIENCE)
        if isinstance(answer, Waited) and any(
            each.stream == "training" for each in answer.outcomes
        ):
            asyncio.get_running_loop().call_later(0.05, self.buried.set)
        return answer


def test_a_refusal_is_not_hidden_by_the_tombstone_it_leaves() -> None:
    holding = Holding("forward_backward", InvalidRequestError("too large"), reach=False)
    server = LoopbackServer(small_mock(latency={"generate": 600}))
    rl = connect(server.url, wrap_transport=holding.wrap)
    generating = rl.sampling.generate([[1]], SamplingParams(max_tokens=1))  # so that a wait is out
    with pytest.raises(InvalidRequestError, match="too large"):
        rl.training.forward_backward(BATCHES[0], LOSS).result(PATIENCE)
    assert not generating.done()
    rl.detach()
    server.stop()


class Swallowing(Garbling):
    """Loses every wait that brings an outcome, as a gateway with a limit on the size does."""

    async def call(self, message: Message, timeout: float) -> Any:
        answer = await self.inner.call(message, timeout)
        if isinstance(answer, Waited) and answer.outcomes:
            raise ConnectionLost("cut by a gateway")
        return answer


def test_waits_that_are_lost_whenever_they_bring_something_end_by_name() -> None:
    server = LoopbackServer(small_mock(latency={"generate": 0.2}), lease_seconds=0.5)
    swallowing = Swallowing("none", InvalidRequestError("unused"))
    rl = connect(server.url, wrap_transport=swallowing.wrap)
    with pytest.raises(UnreachableError, match=r"a Wait to .* was lost .* while other messages"):
        rl.sampling.generate([[1]], SamplingParams(max_tokens=1)).result(PATIENCE)
    rl.detach()
    server.stop()
