"""The server refuses by name and status, before it reads or builds what it would refuse."""

from __future__ import annotations

import asyncio
import logging
import zlib
from typing import Any

import aiohttp
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
    post,
    speaking,
)
from test_http_transport import large_batch, submit_of

from remote_rl import errors
from remote_rl.errors import (
    AuthenticationError,
    BackendError,
    InvalidRequestError,
    RemoteRLError,
)
from remote_rl.messages import Renewed, Wait
from remote_rl.server.app import application
from remote_rl.server.status import status_of
from remote_rl.transports.bodies import ROUTES, receive
from remote_rl.transports.buffer import GrowingBuffer
from remote_rl.transports.http import ASK_FIRST_BYTES
from remote_rl.wire import decode

STATUSES = {
    "InvalidRequestError": 400,
    "UnknownNameError": 400,
    "ProtocolError": 400,
    "AuthenticationError": 401,
    "LeaseError": 403,
    "ConflictError": 409,
    "DirtyGradientsError": 409,
    "OperationCancelled": 409,
    "RunLostError": 410,
    "UnsupportedError": 501,
    "BackendError": 500,
    "StalledError": 500,
    "DeadlineExceededError": 500,
    "UnreachableError": 500,
    "ForkedProcessError": 500,
}


@pytest.mark.parametrize("name", sorted(set(errors.__all__) - {"RemoteRLError"}))
@in_loop
async def test_each_error_has_its_status_and_comes_as_a_frame(name: str) -> None:
    error = getattr(errors, name)("x")
    assert status_of(error) == STATUSES[name]
    async with listening(application(Scripted(error))) as (url, _):
        status, body, _ = await post(url)
    assert status == STATUSES[name]
    assert type(decode(body)).__name__ == name


@in_loop
async def test_an_unexpected_failure_is_a_backend_error_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with pair(Scripted(KeyError("a bug"))) as transport:
        with pytest.raises(BackendError, match="KeyError: 'a bug'") as caught:
            await transport.call(RENEW, LONG)
    assert "in handle" in caught.value.details["traceback"]
    (record,) = [one for one in caplog.records if one.name == "remote_rl.server"]
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None


@in_loop
async def test_a_reply_that_cannot_cross_is_an_error_not_a_broken_answer() -> None:
    async with pair(Scripted(object)) as transport:
        with pytest.raises(RemoteRLError):
            await transport.call(RENEW, LONG)


@in_loop
async def test_the_token_is_wanted_and_compared() -> None:
    handler = Scripted()
    async with listening(application(handler, token="s3cret")) as (url, _):
        for authorization in ("", "Bearer", "Bearer wrong", "Basic s3cret", "Bearer s3cret x"):
            status, body, headers = await post(url, Authorization=authorization)
            assert status == 401
            assert headers["WWW-Authenticate"] == "Bearer"
            assert isinstance(decode(body), AuthenticationError)
        async with speaking(url, token="") as transport:
            with pytest.raises(AuthenticationError, match="missing"):
                await transport.call(RENEW, LONG)
        async with speaking(url, token="wrong") as transport:
            with pytest.raises(AuthenticationError, match="wrong"):
                await transport.call(RENEW, LONG)
            with pytest.raises(AuthenticationError, match="wrong"):
                await transport.call(submit_of(large_batch(1_000_000)), LONG)
        assert not handler.heard
        async with speaking(url, token="s3cret") as transport:
            await transport.call(RENEW, LONG)
    assert handler.heard == [RENEW]


@in_loop
async def test_the_token_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMOTE_RL_TOKEN", "s3cret")
    async with listening(application(Scripted(), token="s3cret")) as (url, _):
        async with speaking(url) as transport:
            await transport.call(RENEW, LONG)
        async with speaking(url, token="other") as transport:
            with pytest.raises(AuthenticationError):
                await transport.call(RENEW, LONG)


@pytest.mark.parametrize("head", ["Authorization: Bearer wrong\r\n", "Expect: 100-continue\r\n"])
@in_loop
async def test_a_refusal_does_not_wait_for_the_body(head: str) -> None:
    async with listening(application(Scripted(), token="s3cret")) as (url, _):
        reader, writer = await _connected(url)
        writer.write(_head(f"Content-Length: 1000000000\r\n{head}"))
        assert (await reader.readline()).startswith(b"HTTP/1.1 401")
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7700", "10.0.0.1", "[2001:db8::1]"])
@in_loop
async def test_without_a_token_only_loopback_names_are_answered(host: str) -> None:
    async with listening(application(Scripted())) as (url, _):
        status, body, _ = await post(url, Host=host)
        assert status == 403
        assert isinstance(decode(body), AuthenticationError)
        for own in ("localhost:7700", "127.0.0.1", "[::1]:80"):
            status, _, _ = await post(url, Host=own)
            assert status == 200


@in_loop
async def test_a_browser_page_can_not_post_without_a_preflight() -> None:
    async with (
        listening(application(Scripted())) as (url, _),
        aiohttp.ClientSession() as session,
    ):
        async with session.options(url + "/v1/renew") as answer:
            assert answer.status == 405
            assert "Access-Control-Allow-Origin" not in answer.headers
        status, _, _ = await post(url, Content_Type="text/plain")
        assert status == 415


@in_loop
async def test_wrong_addresses_methods_and_bodies_have_their_statuses() -> None:
    handler = Scripted()
    async with listening(application(handler)) as (url, _):
        assert (await post(url, path="/v1/renewed"))[0] == 404  # a reply is no message
        assert (await post(url, path="/v1/nonsense"))[0] == 404
        assert (await post(url, path="/v2/renew"))[0] == 404
        assert (await post(url, path="/v1/describe"))[0] == 400  # a frame of another message
        assert (await post(url, body=b"noise"))[0] == 400
        assert (await post(url, body=frame_bytes(Renewed(lease_seconds=1))))[0] == 400
        compressed = zlib.compress(frame_bytes(RENEW))
        assert (await post(url, body=compressed, Content_Encoding="deflate"))[0] == 415
        async with aiohttp.ClientSession() as session, session.get(url + "/v1/renew") as answer:
            assert answer.status == 405
            assert answer.headers["Allow"] == "POST"
    assert not handler.heard


@pytest.mark.parametrize("size", [2_000, 200_000, ASK_FIRST_BYTES * 3])
@in_loop
async def test_a_body_above_the_limit_is_refused_with_the_way_out(size: int) -> None:
    handler = Scripted()
    async with pair(handler, max_body=1_000) as transport:
        with pytest.raises(InvalidRequestError, match="--max-body") as caught:
            await transport.call(submit_of(large_batch(size // 9)), LONG)
        assert caught.value.details == {"limit": 1_000}
        assert await transport.call(RENEW, LONG) == Renewed(lease_seconds=60)
    assert handler.heard == [RENEW]


@in_loop
async def test_a_body_without_a_length_is_refused_once_too_much_has_come() -> None:
    async with listening(application(Scripted(), max_body=100_000)) as (url, _):
        reader, writer = await _connected(url)
        writer.write(_head("Transfer-Encoding: chunked\r\n"))
        writer.write(b"18000\r\n" + bytes(0x18000) + b"\r\n")  # 98,304 bytes: not yet
        await writer.drain()
        answer = asyncio.ensure_future(reader.readline())
        writer.write(b"1000\r\n" + bytes(0x1000) + b"\r\n")  # and no last chunk ever
        assert (await answer).startswith(b"HTTP/1.1 413")
        writer.close()
        await writer.wait_closed()


@in_loop
async def test_memory_follows_the_bytes_received_not_those_announced() -> None:
    async def thousand_bytes() -> Any:
        for _ in range(10):
            yield bytes(100), True

    class Content:
        def iter_chunks(self) -> Any:
            return thousand_bytes()

        def at_eof(self) -> bool:
            return False

    assert len(await receive(Content())) == 1000
    buffer = GrowingBuffer()
    for count in range(1, 100):
        buffer.append(bytes(200_000))
        assert buffer.size == count * 200_000
        with buffer.contents() as held:
            assert held.nbytes == buffer.size
            assert len(held.obj) <= 2.2 * buffer.size


def test_the_buffer_keeps_every_byte_in_order() -> None:
    pieces = [bytes([index % 251]) * size for index, size in enumerate((1, 0, 70_000, 3 << 20) * 4)]
    buffer = GrowingBuffer()
    assert buffer.contents() == b""
    for piece in pieces:
        buffer.append(piece)
    assert buffer.contents() == b"".join(pieces)
    single = GrowingBuffer()
    single.append(pieces[2])
    assert single.contents().obj is pieces[2]


@in_loop
async def test_who_hangs_up_is_not_answered_and_disturbs_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended: asyncio.Queue[str] = asyncio.Queue()

    async def stay(message: Any) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            ended.put_nowait(type(message).__name__)

    handler = Scripted(stay)
    async with pair(handler) as transport:
        for message in (Wait(**LEASED, timeout=9.0), submit_of(large_batch(10))):
            handler.reached.clear()
            call = asyncio.ensure_future(transport.call(message, LONG))
            await handler.reached.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert await ended.get() == type(message).__name__
        handler.answer = Renewed(lease_seconds=60)
        assert await transport.call(RENEW, LONG) == Renewed(lease_seconds=60)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_each_message_has_one_address() -> None:
    assert sorted(ROUTES) == [
        f"/v1/{name}"
        for name in ("attach", "cancel", "describe", "detach", "observe", "renew", "submit")
        + ("wait",)
    ]


def _head(more: str) -> bytes:
    return (
        "POST /v1/renew HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/x-remote-rl-frame\r\n{more}\r\n"
    ).encode()


async def _connected(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))
