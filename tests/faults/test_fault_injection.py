"""The fault-injecting transport itself: it does what it says, as often, from its seed, and leaves
nothing behind; and `connect(wrap_transport=)`."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from faults_support import KINDS, small_mock
from http_support import LONG, RENEW, Scripted, in_loop, pair, raw_server

from remote_rl import AdamW, Batch, Session, connect, losses
from remote_rl.errors import (
    ConflictError,
    InvalidRequestError,
    RemoteRLError,
    UnknownNameError,
    UnreachableError,
)
from remote_rl.messages import ConnectionLost, Message, Renewed, Submit, Transport, Wait
from remote_rl.requests import ForwardBackward, ZeroGrad
from remote_rl.testing import LoopbackServer
from remote_rl.testing.faults import Faults, FaultyTransport
from remote_rl.transports.http import Cut, HttpTransport
from remote_rl.wire import digest

LEASED = {"client_id": "c", "instance_id": "i"}


class Recorder:
    """A transport that answers at once, and says what it was asked."""

    target = "recorder"
    submits = 5

    def __init__(self, answer: Any = "answer") -> None:
        self.heard: list[Any] = []
        self.answer = answer
        self.closed = 0
        self.hold: asyncio.Event | None = None

    async def call(self, message: Message, timeout: float) -> Any:
        self.heard.append(message)
        await asyncio.sleep(0)
        if self.hold is not None:
            await self.hold.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def digest(self, request: Any) -> None:
        return None

    async def close(self) -> None:
        self.closed += 1


def submit(number: int) -> Submit:
    return Submit(**LEASED, operation="zero_grad", number=number, request=ZeroGrad())


async def outcomes(transport: Transport, count: int) -> list[str]:
    """What becomes of `count` submits, one after the other."""
    seen = []
    for number in range(1, count + 1):
        try:
            seen.append(await transport.call(submit(number), LONG))
        except ConnectionLost as lost:
            seen.append(str(lost))
    return seen


# -- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"lose_request": 1.5}, InvalidRequestError, "lose_request"),
        ({"duplicate": -0.1}, InvalidRequestError, "duplicate"),
        ({"delay": "often"}, InvalidRequestError, "delay"),
        ({"delay": True}, InvalidRequestError, "delay"),
        ({"delay_seconds": -1}, InvalidRequestError, "delay_seconds"),
        ({"seed": 0.5}, InvalidRequestError, "seed"),
        ({"lose_requests": 0.1}, UnknownNameError, "did you mean 'lose_request'"),
        ({"lose_request": 0.6, "cut_response": 0.6}, InvalidRequestError, r"come to 1\.2"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Faults(**settings)


@in_loop
async def test_without_settings_nothing_happens() -> None:
    recorder, faults = Recorder(), Faults()
    transport = faults.wrap(recorder)
    assert (transport.target, transport.submits) == ("recorder", 5)
    assert await outcomes(transport, 100) == ["answer"] * 100
    assert not faults.injected
    assert transport.digest(ZeroGrad()) == digest(ZeroGrad())  # anything may be sent twice
    await transport.close()
    assert recorder.closed == 1


# -- what it does ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lose_request", "cut_request", "lose_response", "cut_response"])
@in_loop
async def test_a_loss_before_or_after_it_was_executed(kind: str) -> None:
    recorder = Recorder(ConflictError("an answer like any other"))
    transport = Faults(**{kind: 1}).wrap(recorder)
    with pytest.raises(ConnectionLost, match=kind):
        await transport.call(RENEW, LONG)
    assert len(recorder.heard) == kind.endswith("response")
    assert transport.injected == Counter({kind: 1})
    await transport.close()


@in_loop
async def test_duplicates_come_at_once_or_after_others_and_nobody_hears_their_answers() -> None:
    recorder, faults = Recorder(), Faults(duplicate=1, seed=1)
    transport = faults.wrap(recorder)
    assert await outcomes(transport, 60) == ["answer"] * 60
    recorder.answer = ConflictError("a late duplicate")
    await transport.close()
    numbers = [message.number for message in recorder.heard]
    assert Counter(numbers) == Counter(dict.fromkeys(range(1, 61), 2))
    apart = [
        len(numbers) - 1 - numbers[::-1].index(each) - numbers.index(each) for each in range(1, 61)
    ]
    assert min(apart) <= 2  # at once
    assert max(apart) > 10
    assert faults.injected["duplicate"] == 60
    assert 0 < faults.injected["duplicate_refused"] <= 20  # those that came at the end


@in_loop
async def test_a_reordered_message_comes_after_a_later_one() -> None:
    recorder = Recorder()
    transport = Faults(reorder=0.5, reorder_seconds=60).wrap(recorder)
    calls = [asyncio.ensure_future(transport.call(submit(number), LONG)) for number in range(1, 40)]
    calls.append(asyncio.ensure_future(FaultyTransport.call(transport, submit(99), LONG)))
    await asyncio.wait(calls, timeout=1)
    order = [message.number for message in recorder.heard]
    assert order != sorted(order)
    assert transport.injected["reorder"] > 10
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await transport.close()


@in_loop
async def test_what_nothing_overtakes_is_not_held_for_ever() -> None:
    recorder = Recorder()
    transport = Faults(reorder=1, reorder_seconds=0.01).wrap(recorder)
    assert await transport.call(RENEW, LONG) == "answer"
    assert transport.injected == Counter(reorder=1)
    await transport.close()


@in_loop
async def test_a_delay_is_of_the_message_or_of_its_answer() -> None:
    recorder = Recorder()
    transport = Faults(delay=1, delay_seconds=0.02).wrap(recorder)
    began = time.monotonic()
    assert await outcomes(transport, 20) == ["answer"] * 20
    assert time.monotonic() - began >= 0.1  # 20 times 10 ms on average
    assert transport.injected == Counter(delay=20)
    await transport.close()


@in_loop
async def test_the_same_seed_does_the_same_whatever_the_order_of_the_messages() -> None:
    settings: dict[str, Any] = {"lose_request": 0.2, "lose_response": 0.2}
    first = await outcomes(Faults(seed=3, **settings).wrap(Recorder()), 100)
    faults = Faults(seed=3, **settings)
    again = faults.wrap(Recorder())
    backwards: dict[int, str] = {}
    for number in range(100, 0, -1):
        with_waits = [Wait(**LEASED, timeout=1.0), submit(number)]
        for message in with_waits:
            try:
                answer = await again.call(message, LONG)
            except ConnectionLost as lost:
                answer = str(lost)
        backwards[number] = answer
    assert [backwards[number] for number in range(1, 101)] == first
    assert await outcomes(faults.wrap(Recorder()), 100) == first  # each wrapping begins anew
    assert await outcomes(Faults(seed=4, **settings).wrap(Recorder()), 100) != first


@in_loop
async def test_probabilities_are_those_of_the_settings_and_do_not_disturb_each_other() -> None:
    settings: dict[str, Any] = {
        "lose_request": 0.05,
        "lose_response": 0.1,
        "cut_request": 0.15,
        "cut_response": 0.2,
        "duplicate": 0.25,
        "delay": 0.3,
        "delay_seconds": 0,
        "reorder": 0.35,
        "reorder_seconds": 0,
    }
    transport = Faults(seed=5, **settings).wrap(Recorder())
    await outcomes(transport, 4000)
    await transport.close()
    for kind in KINDS:
        assert transport.injected[kind] / 4000 == pytest.approx(settings[kind], abs=0.03), kind


@in_loop
async def test_a_close_leaves_no_task_behind() -> None:
    recorder = Recorder()
    before = asyncio.all_tasks()
    transport = Faults(duplicate=1, seed=2).wrap(recorder)
    await outcomes(transport, 30)
    recorder.hold = asyncio.Event()  # the rest of the duplicates never gets an answer
    await transport.close()
    assert asyncio.all_tasks() == before
    assert recorder.closed == 1


# -- cuts over HTTP -------------------------------------------------------------------------------


def large_submit() -> Submit:
    batch = Batch(
        prompts=[[1]], prompt_index=[0], responses=[list(range(400_000))], temperature=1.0
    )
    request = ForwardBackward(batch=batch, loss=losses.CrossEntropy())
    return Submit(**LEASED, operation="forward_backward", number=1, request=request)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
@in_loop
async def test_a_cut_request_really_breaks_in_mid_body(share: float, large: bool) -> None:
    """The server gets that share of the body and then the end of the connection."""
    got: list[bytes] = []

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = b""
        while piece := await reader.read(1 << 16):
            data += piece
            if b"100-continue" in data and len(got) == 0:
                got.append(b"")
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        got.append(data)

    message = large_submit() if large else submit(1)
    async with raw_server(respond) as url:
        transport = HttpTransport(url)
        with pytest.raises(ConnectionLost):
            await transport.call(message, LONG, Cut("up", share))
        await transport.close()
    data = got[-1] if got else b""
    head, _, body = data.partition(b"\r\n\r\n")
    if share == 0.0:
        assert body == b""
        return
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    assert len(body) == int(share * length)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
@in_loop
async def test_a_cut_answer_is_lost_after_it_was_executed_and_the_connection_with_it(
    share: float,
) -> None:
    handler = Scripted()
    async with pair(handler) as transport:
        with pytest.raises(ConnectionLost, match="cut off"):
            await transport.call(RENEW, LONG, Cut("down", share))
        assert handler.heard == [RENEW]
        assert await transport.call(RENEW, LONG) == Renewed(lease_seconds=60)


@pytest.mark.parametrize("kind", ["cut_request", "cut_response"])
@in_loop
async def test_faults_cut_for_real_over_http(kind: str) -> None:
    handler = Scripted()
    async with pair(handler) as transport:
        faulty = Faults(**{kind: 1}).wrap(transport)
        for _ in range(5):
            with pytest.raises(ConnectionLost) as caught:
                await faulty.call(large_submit(), LONG)
            assert "injected" not in str(caught.value)
        assert faulty.injected == Counter({kind: 5})
    assert len(handler.heard) == 5 * (kind == "cut_response")


@pytest.mark.parametrize("share", [0.1, 0.99])
@in_loop
async def test_a_digest_taken_while_the_bytes_are_sent_survives_a_cut_and_a_duplicate(
    share: float,
) -> None:
    """What is sent again, or twice at the same time, carries the digest of the whole request."""
    handler = Scripted()
    async with pair(handler) as transport:
        request = large_submit().request
        message = Submit(
            **LEASED,
            operation="forward_backward",
            number=1,
            request=request,
            digest=transport.digest(request),
        )
        with pytest.raises(ConnectionLost):
            await transport.call(message, LONG, Cut("up", share))
        await asyncio.gather(*(transport.call(message, LONG) for _ in range(3)))
    assert {heard.digest for heard in handler.heard} == {digest(request)}
    assert len(handler.heard) == 3


# -- connect(wrap_transport=) ---------------------------------------------------------------------


def used(rl: Session) -> None:
    rl.training.zero_grad().result(60)


def test_it_wraps_what_every_target_leads_to() -> None:
    faults = Faults(delay=1, delay_seconds=0)
    for target in ("mock", small_mock()):
        with connect(target, wrap_transport=faults.wrap) as rl:
            used(rl)
    assert faults.injected["delay"] >= 8
    server = LoopbackServer(small_mock())
    try:
        with connect(server.url, wrap_transport=faults.wrap) as driver:
            before = faults.injected["delay"]
            with connect(driver.handle(), wrap_transport=faults.wrap) as member:
                used(member)
            assert faults.injected["delay"] >= before + 4
    finally:
        server.stop()


@pytest.mark.parametrize("wrap", [Faults(), "faults", 3])
def test_what_is_no_function_is_refused(wrap: Any) -> None:
    with pytest.raises(InvalidRequestError, match="wrap_transport must be a function"):
        connect("mock", wrap_transport=wrap)


@pytest.mark.parametrize("over", ["inprocess", "http"])
def test_a_wrapping_that_fails_leaves_nothing_behind(over: str) -> None:
    def none(inner: Transport) -> Any:
        return None

    def broken(inner: Transport) -> Transport:
        raise KeyError("no")

    server = LoopbackServer(small_mock())
    before = threading.active_count()
    try:
        for wrap, error in ((none, InvalidRequestError), (broken, KeyError)):
            target = small_mock() if over == "inprocess" else server.url
            with pytest.raises(error):
                connect(target, wrap_transport=wrap)
        clients = [t for t in threading.enumerate() if t.name == "remote_rl client"]
        assert len(clients) <= 1  # the server's own
        assert threading.active_count() <= before + 1
    finally:
        server.stop()


@pytest.mark.parametrize("over", ["inprocess", "http"])
def test_where_everything_is_lost_connect_says_so(over: str) -> None:
    server = LoopbackServer(small_mock())
    try:
        target = small_mock() if over == "inprocess" else server.url
        with pytest.raises(UnreachableError, match="nothing answers"):
            connect(target, wrap_transport=Faults(lose_request=1).wrap)
    finally:
        server.stop()


def test_errors_of_the_run_come_through(tmp_path: Path) -> None:
    faults = Faults(seed=1, lose_request=0.2, lose_response=0.2, duplicate=0.3)
    with connect(small_mock(), wrap_transport=faults.wrap, checkpoint_dir=tmp_path) as rl:
        with pytest.raises(RemoteRLError, match="nothing was accumulated"):
            rl.training.optim_step(AdamW(lr=0.1)).result(60)
        with pytest.raises(InvalidRequestError, match="there is no"):
            rl.training.load("nothing").result(60)
        used(rl)
