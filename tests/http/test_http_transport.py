"""Messages over HTTP: the same bits arrive, and every way to fail has its name."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from http_support import (
    LEASED,
    LONG,
    RENEW,
    Scripted,
    frame_bytes,
    in_loop,
    listening,
    pair,
    raw_server,
    read_request,
    response,
    speaking,
)

from remote_rl import Batch, Ragged, errors, losses, requests
from remote_rl.errors import (
    AuthenticationError,
    InvalidRequestError,
    ProtocolError,
    RemoteRLError,
)
from remote_rl.messages import ConnectionLost, Describe, Outcome, Renewed, Submit, Wait, Waited
from remote_rl.server.app import application
from remote_rl.transports.http import CONNECTIONS, HttpTransport
from remote_rl.types.results import Outputs
from remote_rl.wire import digest

#: the frame of an object that a client with other field names would send
WRONG_FIELD = frame_bytes(Renewed(lease_seconds=1)).replace(b"lease_seconds", b"lease_secundo")


def large_batch(tokens: int) -> Batch:
    generator = np.random.default_rng(1)
    responses = Ragged(generator.integers(0, 9999, tokens, np.int32), [0, tokens // 3, tokens])
    return Batch(
        prompts=[[1, 2, 3]],
        prompt_index=[0, 0],
        responses=responses,
        temperature=1.0,
        advantages=responses.with_values(generator.standard_normal(tokens, np.float32)),
    )


def submit_of(batch: Batch) -> Submit:
    request = requests.ForwardBackward(batch=batch, loss=losses.CrossEntropy())
    return Submit(**LEASED, operation="forward_backward", number=1, request=request)


@in_loop
async def test_a_message_arrives_and_its_reply_comes_back() -> None:
    handler = Scripted(Renewed(lease_seconds=12.5))
    async with pair(handler) as transport:
        reply = await transport.call(RENEW, LONG)
    assert reply == Renewed(lease_seconds=12.5)
    assert handler.heard == [RENEW]


@pytest.mark.parametrize("tokens", [10, 20_000, 3_000_000])
@in_loop
async def test_a_batch_of_any_size_crosses_both_ways_bit_for_bit(tokens: int) -> None:
    batch = large_batch(tokens)

    async def echo(message: Any) -> Outcome:
        received = message.request.batch
        values = {"logprobs": received.advantages, "entropy": received.advantages}
        result = Outputs(values=values, version=1)
        return Outcome(stream="training", number=1, done=True, result=result)

    handler = Scripted(echo)
    async with pair(handler) as transport:
        outcome = await transport.call(submit_of(batch), LONG)
    (heard,) = handler.heard
    assert isinstance(heard, Submit)
    assert heard.request == submit_of(batch).request
    logprobs = outcome.result.logprobs
    assert logprobs.values.tobytes() == batch.advantages.values.tobytes()
    assert not logprobs.values.flags.owndata  # a view into what was received
    assert outcome.result.entropy.values is logprobs.values


@pytest.mark.parametrize("name", sorted(set(errors.__all__) - {"RemoteRLError"}))
@in_loop
async def test_an_error_of_the_other_side_is_raised_as_its_class(name: str) -> None:
    sent = getattr(errors, name)("what, where, what to do", row=3)
    sent.__cause__ = InvalidRequestError("the reason")
    async with pair(Scripted(sent)) as transport:
        with pytest.raises(RemoteRLError, match="what, where, what to do") as caught:
            await transport.call(RENEW, LONG)
    assert type(caught.value) is type(sent)
    assert caught.value.details == {"row": 3}
    assert isinstance(caught.value.__cause__, InvalidRequestError)


@in_loop
async def test_nothing_at_the_address_is_a_lost_connection_with_its_cause() -> None:
    async def hang_up(_: Any, __: Any) -> None:
        return

    async with raw_server(hang_up) as url:
        pass  # closed again, so that the port is free for sure
    async with speaking(url) as transport:
        with pytest.raises(ConnectionLost, match=r"127\.0\.0\.1") as caught:
            await transport.call(RENEW, LONG)
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("cut", [0, 10, 100, 200, -1])
@in_loop
async def test_an_answer_that_is_cut_off_is_a_lost_connection(cut: int) -> None:
    whole = response(frame_bytes(Renewed(lease_seconds=60)))

    async def cut_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(whole[:cut])
        await writer.drain()

    async with raw_server(cut_off) as url, speaking(url) as transport:
        with pytest.raises(ConnectionLost):
            await transport.call(RENEW, LONG)


@in_loop
async def test_a_request_that_is_cut_off_is_a_lost_connection() -> None:
    async def cut_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await reader.readexactly(100_000)
        writer.transport.abort()

    async with raw_server(cut_off) as url, speaking(url) as transport:
        with pytest.raises(ConnectionLost):
            await transport.call(submit_of(large_batch(3_000_000)), LONG)


@in_loop
async def test_no_answer_in_time_is_a_lost_connection() -> None:
    async def never(_: Any) -> None:
        await asyncio.Event().wait()

    async with pair(Scripted(never)) as transport:
        with pytest.raises(ConnectionLost, match=r"within 0\.05 s"):
            await transport.call(Wait(**LEASED, timeout=1.0), 0.05)
        with pytest.raises(ConnectionLost, match=r"within 0\.05 s"):
            await transport.call(RENEW, 0.05)


@in_loop
async def test_the_timeout_does_not_cut_a_body_that_moves() -> None:
    whole = response(frame_bytes(Renewed(lease_seconds=60)))

    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        head = len(whole) - 8
        for start, stop in [(0, head), *((at, at + 1) for at in range(head, len(whole)))]:
            writer.write(whole[start:stop])
            await writer.drain()
            await asyncio.sleep(0.1)  # the slow line itself, 0.8 s in all

    async with raw_server(trickle) as url, speaking(url) as transport:
        assert await transport.call(RENEW, 0.4) == Renewed(lease_seconds=60)


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (response(b"<html>hello</html>", kind="text/html"), "HTTP 200, text/html.*<html>hello"),
        (response(b"nope", status="404 Not Found", kind="text/plain"), "HTTP 404"),
        (response(b"", status="403 Forbidden", kind="text/html"), "HTTP 403"),
        (b"HTTP/1.1 302 Found\r\nLocation: /login\r\nContent-Length: 0\r\n\r\n", "HTTP 302"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "not HTTP"),
        (response(b"\x00" * 100), "don't begin as a frame"),
        (response(frame_bytes(Renewed(lease_seconds=1))[:48]), "frame"),
        (response(WRONG_FIELD), "can't be read.*lease_seconds"),
    ],
)
@in_loop
async def test_an_answer_of_something_else_is_a_protocol_error(answer: bytes, match: str) -> None:
    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(answer)
        await writer.drain()

    async with raw_server(respond) as url, speaking(url) as transport:
        with pytest.raises(ProtocolError, match=match):
            await transport.call(RENEW, LONG)


@pytest.mark.parametrize(
    "status", ["502 Bad Gateway", "503 Unavailable", "500 Oops", "429 Too Many", "520 Unknown"]
)
@in_loop
async def test_a_gateway_that_reaches_nobody_is_a_lost_connection(status: str) -> None:
    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(response(b"<html>", status=status, kind="text/html"))
        await writer.drain()

    async with raw_server(respond) as url, speaking(url) as transport:
        with pytest.raises(ConnectionLost, match="gateway"):
            await transport.call(RENEW, LONG)


@in_loop
async def test_a_401_of_a_gateway_is_an_authentication_error() -> None:
    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(response(b"", status="401 Unauthorized", kind="text/html"))
        await writer.drain()

    async with raw_server(respond) as url, speaking(url) as transport:
        with pytest.raises(AuthenticationError, match="REMOTE_RL_TOKEN"):
            await transport.call(RENEW, LONG)


@in_loop
async def test_many_calls_share_few_connections() -> None:
    together, release = 0, asyncio.Event()

    async def gather(_: Any) -> Renewed:
        nonlocal together
        together += 1
        if together == CONNECTIONS:
            release.set()
        await release.wait()
        return Renewed(lease_seconds=60)

    handler = Scripted(gather)
    async with (
        listening(application(handler)) as (url, app_runner),
        speaking(url) as transport,
    ):
        replies = await asyncio.gather(*(transport.call(RENEW, LONG) for _ in range(60)))
        assert len(replies) == 60
        assert len(app_runner.server.connections) == CONNECTIONS


@in_loop
async def test_a_cancelled_call_leaves_the_transport_usable() -> None:
    async def slow_wait(message: Any) -> Any:
        if isinstance(message, Wait):
            await asyncio.Event().wait()
        return Renewed(lease_seconds=60)

    handler = Scripted(slow_wait)
    async with pair(handler) as transport:
        call = asyncio.ensure_future(transport.call(Wait(**LEASED, timeout=1.0), LONG))
        await handler.reached.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await transport.call(RENEW, LONG) == Renewed(lease_seconds=60)


@in_loop
async def test_a_closed_transport_opens_nothing_any_more() -> None:
    """What is late, such as a duplicate that was kept back, leaves no connection behind."""
    async with pair(Scripted()) as transport:
        await transport.call(RENEW, LONG)
        await transport.close()
        with pytest.raises(ConnectionLost, match="closed"):
            await transport.call(RENEW, LONG)


def test_a_transport_belongs_to_one_loop() -> None:
    transport = HttpTransport("http://127.0.0.1:9")

    async def lost() -> None:
        with pytest.raises(ConnectionLost):
            await transport.call(RENEW, LONG)

    with asyncio.Runner() as first, asyncio.Runner() as second:
        first.run(lost())
        with pytest.raises(RuntimeError, match="event loop"):
            second.run(transport.call(RENEW, LONG))
        first.run(transport.close())


@pytest.mark.parametrize(
    "url",
    [
        "gpu-box:7700",
        "ftp://gpu-box",
        "http://",
        "http://gpu-box:port",
        "http://gpu-box:99999",
        "http://user:secret@gpu-box",
        "http://gpu-box/?token=secret",
        "http://[::1",
    ],
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="address"):
        HttpTransport(url)


def test_a_path_before_the_messages_is_kept() -> None:
    assert HttpTransport("https://host/runs/a/").target == "https://host/runs/a"


def test_certificates_without_https_or_a_file_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="https"):
        HttpTransport("http://host", ca_file="ca.pem")
    with pytest.raises(InvalidRequestError, match="no-such-file"):
        HttpTransport("https://host", ca_file="no-such-file")


def test_the_digest_is_that_of_the_wire() -> None:
    request = requests.ForwardBackward(batch=large_batch(10), loss=losses.CrossEntropy())
    assert HttpTransport("http://host").digest(request).text() == digest(request)


def test_importing_the_transport_does_not_import_the_http_client() -> None:
    script = "import sys, remote_rl.transports.http; print('aiohttp' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == "False"


@in_loop
async def test_a_wait_may_answer_with_nothing() -> None:
    async with pair(Scripted(Waited())) as transport:
        assert await transport.call(Wait(**LEASED, timeout=0.0), LONG) == Waited()
        assert await transport.call(Describe(), LONG) == Waited()
