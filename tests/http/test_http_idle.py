"""Connections that stop, hang up, or never come to a request: each ends, none fills the log."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from http_support import LONG, RENEW, Scripted, frame_bytes, in_loop, listening, pair
from test_http_refusals import head, large_outcome, opened

from remote_rl.errors import BackendError
from remote_rl.messages import Renewed
from remote_rl.server.app import application


@pytest.mark.parametrize(
    "trouble", ["stops in its body", "hangs up in its body", "resets in its body", "takes nothing"]
)
@in_loop
async def test_a_client_in_trouble_is_one_line_of_the_log_at_most(
    trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And never a traceback: nothing of ours has failed."""
    caplog.set_level(logging.DEBUG)
    handler = Scripted(large_outcome())
    body = frame_bytes(RENEW)
    async with listening(application(handler, io_timeout=0.2)) as (url, app_runner):
        _, writer = await opened(url)
        if trouble == "takes nothing":
            writer.write(head(f"Content-Length: {len(body)}") + body)
        else:
            writer.write(head("Content-Length: 100000") + body)
        while not app_runner.server.connections:
            await asyncio.sleep(0.01)
        if trouble == "hangs up in its body":
            writer.close()
        elif trouble == "resets in its body":
            writer.transport.abort()
        while app_runner.server.connections:
            await asyncio.sleep(0.02)
        writer.close()
    records = [one for one in caplog.records if one.name.startswith(("remote_rl", "aiohttp"))]
    assert not [one for one in records if one.exc_info]
    told = [one.getMessage() for one in records if one.levelno > logging.INFO]
    if trouble in ("stops in its body", "takes nothing"):
        (line,) = told
        assert "nothing for 0.2 s" in line
    else:
        assert told == []


@in_loop
async def test_a_connection_error_of_the_server_s_own_is_told_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The client is there: it was not its connection that broke."""
    async with pair(Scripted(ConnectionResetError("to a worker"))) as transport:
        with pytest.raises(BackendError, match="to a worker"):
            await transport.call(RENEW, LONG)
    assert [one.levelno for one in caplog.records if one.exc_info] == [logging.ERROR]


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v1/describe HTTP/1.1\r\nX-",
        b"P",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /h",
        b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=["nothing", "half a head", "a byte", "kept alive", "half a second head", "not found"],
)
@pytest.mark.parametrize("drips", [False, True])
@in_loop
async def test_a_connection_without_a_request_is_cut(sent: bytes, drips: bool) -> None:
    """Whether it says nothing more or goes on byte by byte."""
    app = application(
        Scripted(SimpleNamespace(lost=None, stopping=False)), token="t", io_timeout=0.4
    )
    async with listening(app) as (url, app_runner):
        reader, writer = await opened(url)
        writer.write(sent)
        reading = asyncio.create_task(reader.read())
        while not reading.done():
            await asyncio.sleep(0.05)  # the slow client itself
            if drips and b"\r\nX-" in sent and not writer.is_closing():
                writer.write(b"x")
        await asyncio.gather(reading, return_exceptions=True)
        writer.close()
        while app_runner.server.connections:
            await asyncio.sleep(0.02)


@in_loop
async def test_small_answers_that_nobody_takes_end_their_connection() -> None:
    """Many requests behind each other, of somebody without the token who reads nothing."""
    app = application(Scripted(), token="t", io_timeout=0.4)
    async with listening(app) as (url, app_runner):
        _, writer = await opened(url)
        one = b"GET /" + b"n" * 200 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
        writer.transport.pause_reading()
        while not writer.transport.get_write_buffer_size() > 1 << 20:
            writer.write(one * 1000)
            await asyncio.sleep(0)
            if writer.is_closing():
                break
        while app_runner.server.connections:
            await asyncio.sleep(0.02)
        writer.transport.abort()


@in_loop
async def test_a_long_poll_is_no_connection_without_a_request() -> None:
    async def late(message: Any) -> Renewed:
        await asyncio.sleep(1.0)  # five times as long as an idle connection has
        return Renewed(lease_seconds=1)

    async with pair(Scripted(late), io_timeout=0.2) as transport:
        assert await transport.call(RENEW, LONG) == Renewed(lease_seconds=1)
        await asyncio.sleep(0.5)  # its connection is cut meanwhile
        assert await transport.call(RENEW, LONG) == Renewed(lease_seconds=1)
