"""What an attacker tries first: tokens, sizes that lie, bodies that never end, names that lead out
of their directory."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from http_support import (
    LONG,
    RENEW,
    Scripted,
    frame_bytes,
    in_loop,
    listening,
    post,
    raw_server,
    read_request,
    response,
    speaking,
)
from run_support import served

from remote_rl import Ragged
from remote_rl.errors import InvalidRequestError, ProtocolError, RemoteRLError
from remote_rl.messages import Attach, Outcome, Renewed, Submit
from remote_rl.protocol import PROTOCOL_VERSIONS
from remote_rl.requests import Delete, Export, ListFiles, Load, ReadFile, Save
from remote_rl.server import access
from remote_rl.server.app import application
from remote_rl.types.results import Outputs
from remote_rl.wire import decode

REFUSED = re.compile(rb"HTTP/1\.[01] 4\d\d ")
TOKEN = "s3cret-of-the-server"
PRESENTED = [
    (None, ""),
    ("", ""),
    ("Bearer", ""),
    ("Bearer x", "x"),
    (f"Bearer {TOKEN[:-1]}", TOKEN[:-1]),
    (f"Bearer {TOKEN[:-1]}X", TOKEN[:-1] + "X"),
    (f"Bearer {TOKEN}{'x' * 500}", TOKEN + "x" * 500),
    (f"Basic {TOKEN}", TOKEN),
    (f"Bearer {TOKEN}", TOKEN),
]


def headers_of(authorization: str | None) -> dict[str, str]:
    return {} if authorization is None else {"Authorization": authorization}


async def raw(url: str, sent: bytes) -> bytes:
    """All that a server answers to these bytes, until it closes the connection."""
    reader, writer = await opened(url)
    writer.write(sent)
    try:
        return await asyncio.wait_for(reader.read(), LONG)
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def opened(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


def head(*more: str, path: str = "/v1/renew") -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/x-remote-rl-frame",
        *more,
    ]
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape")


# -- tokens ---------------------------------------------------------------------------------------


@in_loop
async def test_every_request_is_compared_whole_whatever_it_presents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[tuple[bytes, bytes]] = []
    own = access.hmac.compare_digest

    def compare(one: Any, other: Any) -> bool:
        compared.append((bytes(one), bytes(other)))
        return own(one, other)

    monkeypatch.setattr(access.hmac, "compare_digest", compare)
    async with listening(application(Scripted(), token=TOKEN)) as (url, _):
        for authorization, presented in PRESENTED:
            compared.clear()
            status, _, _ = await post(url, **headers_of(authorization))
            assert status == (200 if authorization == f"Bearer {TOKEN}" else 401)
            assert compared == [(presented.encode(), TOKEN.encode())]


@in_loop
async def test_nothing_but_the_comparison_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening(application(Scripted(), token=TOKEN)) as (url, _):
        monkeypatch.setattr(access.hmac, "compare_digest", lambda one, other: True)
        assert (await post(url, Authorization="Bearer anything"))[0] == 200
        monkeypatch.setattr(access.hmac, "compare_digest", lambda one, other: False)
        assert (await post(url, Authorization=f"Bearer {TOKEN}"))[0] == 401


@in_loop
async def test_a_token_in_a_broken_request_reaches_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with listening(application(Scripted(), token=TOKEN)) as (url, _):
        for header in (
            f"Authorization: Bearer {TOKEN}\x01",
            f"Authorization: Bearer {TOKEN}\x00",
            f"Authorization : Bearer {TOKEN}",
            f"Authorization: Bearer {TOKEN}\r\nAuthorization: Bearer {TOKEN}",
            f"Authorization: Bearer {TOKEN}\udcff",
            f"Authorization: Bearer {TOKEN}\nX: y",
        ):
            await raw(url, head(header, "Content-Length: 0", "Connection: close"))
    assert TOKEN not in caplog.text
    assert not [one for one in caplog.records if TOKEN in repr(vars(one))]


# -- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lies",
    [
        ("Content-Length: 10000000000000000000000000",),
        ("Content-Length: -1",),
        ("Content-Length: +5",),
        ("Content-Length: 0x10",),
        ("Content-Length: ten",),
        ("Content-Length: 5", "Content-Length: 6"),
        ("Content-Length: 5", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: gzip, chunked",),
        ("Transfer-Encoding: identity",),
        (),
        ("Content-Length: 0",),
        ("X-Long: " + "x" * 100_000, "Content-Length: 0"),
        (*(f"X-{index}: y" for index in range(5000)), "Content-Length: 0"),
    ],
    ids=lambda lies: "; ".join(lies)[:40] or "none",
)
@in_loop
async def test_a_length_that_lies_or_is_missing_is_refused_and_the_server_goes_on(
    lies: tuple[str, ...],
) -> None:
    handler = Scripted()
    async with listening(application(handler, max_body=10_000, io_timeout=0.3)) as (url, _):
        answer = await raw(url, head(*lies, "Connection: close") + b"0\r\n\r\n")
        assert REFUSED.match(answer) or answer == b"", answer[:200]
        assert not handler.heard
        assert (await post(url))[0] == 200


@pytest.mark.parametrize("path", ["/" + "x" * 100_000, "/v1/../healthz", "//v1/renew", "/v1/%00"])
@in_loop
async def test_an_address_that_is_none_is_refused(path: str) -> None:
    handler = Scripted()
    async with listening(application(handler)) as (url, _):
        answer = await raw(url, head("Content-Length: 0", "Connection: close", path=path))
        assert REFUSED.match(answer), answer[:200]
        assert not handler.heard


@in_loop
async def test_what_follows_a_body_is_no_part_of_it() -> None:
    handler = Scripted()
    body = frame_bytes(RENEW)
    async with listening(application(handler)) as (url, _):
        answer = await raw(url, head(f"Content-Length: {len(body) - 5}") + body)
        assert REFUSED.match(answer)
        assert not handler.heard


@in_loop
async def test_chunks_are_counted_as_they_come() -> None:
    handler = Scripted()
    async with listening(application(handler, max_body=1000)) as (url, _):
        chunks = b"".join(b"64\r\n" + bytes(0x64) + b"\r\n" for _ in range(20))
        answer = await raw(
            url, head("Transfer-Encoding: chunked", "Connection: close") + chunks + b"0\r\n\r\n"
        )
        assert answer.startswith(b"HTTP/1.1 413")
        whole = b"".join(b"1\r\n" + bytes([each]) + b"\r\n" for each in frame_bytes(RENEW))
        answer = await raw(
            url, head("Transfer-Encoding: chunked", "Connection: close") + whole + b"0\r\n\r\n"
        )
        assert answer.startswith(b"HTTP/1.1 200")
    assert handler.heard == [RENEW]


@in_loop
async def test_bodies_of_length_0_are_read_to_their_end_however_many_come() -> None:
    # aiohttp reads all of them through one object, which ends once only
    handler = Scripted()
    async with listening(application(handler)) as (url, _):
        for _ in range(3):
            assert (await post(url, body=b""))[0] == 400
            for path in ("/healthz", "/metrics", "/v1/renew"):
                await raw(url, head("Content-Length: 0", "Connection: close", path=path))
        assert (await post(url))[0] == 200


@in_loop
async def test_answers_of_length_0_are_read_to_their_end_however_many_come() -> None:
    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(response(b""))
        await writer.drain()

    async with raw_server(respond) as url:
        for _ in range(3):
            async with speaking(url) as transport:
                with pytest.raises(ProtocolError, match="a frame has at least 8 bytes"):
                    await transport.call(RENEW, LONG)


# -- bodies that don't move -----------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"x", bytes(50_000)])
@in_loop
async def test_a_body_that_stops_is_given_up_and_its_connection_cut(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    handler = Scripted()
    async with listening(application(handler, io_timeout=0.2)) as (url, _):
        assert await raw(url, head("Content-Length: 100000") + sent) == b""  # may be sent again
        assert not handler.heard
        assert (await post(url))[0] == 200
    assert "sent nothing for 0.2 s" in caplog.text


@in_loop
async def test_a_body_that_moves_slowly_is_taken() -> None:
    body = frame_bytes(RENEW)
    async with listening(application(Scripted(), io_timeout=1.5)) as (url, _):
        reader, writer = await opened(url)
        writer.write(head(f"Content-Length: {len(body)}", "Connection: close"))
        for start in range(0, len(body), 16):
            writer.write(body[start : start + 16])
            await writer.drain()
            await asyncio.sleep(0.25)  # the slow line itself, 2 s in all
        assert (await asyncio.wait_for(reader.read(), LONG)).startswith(b"HTTP/1.1 200")
        writer.close()


def large_outcome() -> Outcome:
    rows = Ragged([0.5] * 4_000_000, [0, 4_000_000])
    result = Outputs(values={"logprobs": rows}, version=1)
    return Outcome(stream="training", number=1, done=True, result=result)


@in_loop
async def test_an_answer_that_nobody_takes_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    handler = Scripted(large_outcome())
    body = frame_bytes(RENEW)
    async with listening(application(handler, io_timeout=0.2)) as (url, app_runner):
        _, writer = await opened(url)
        writer.write(head(f"Content-Length: {len(body)}") + body)
        await handler.reached.wait()  # and reads nothing
        while "took nothing for 0.2 s" not in caplog.text:
            await asyncio.sleep(0.02)
        while app_runner.server.connections:
            await asyncio.sleep(0.02)
        writer.close()
        handler.answer = Renewed(lease_seconds=1)
        assert (await post(url))[0] == 200


@in_loop
async def test_an_answer_that_is_taken_slowly_arrives_whole() -> None:
    async with listening(application(Scripted(large_outcome()), io_timeout=1.0)) as (url, _):
        reader, writer = await opened(url)
        body = frame_bytes(RENEW)
        writer.write(head(f"Content-Length: {len(body)}", "Connection: close") + body)
        received = 0
        for pause in [0.3] * 6 + [0.0] * 1_000_000:
            piece = await asyncio.wait_for(reader.read(1 << 20), LONG)
            received += len(piece)
            if not piece:
                break
            await asyncio.sleep(pause)
        assert received > len(frame_bytes(large_outcome()))
        writer.close()


# -- names ----------------------------------------------------------------------------------------

NAMES = ["..", ".", "../x", "a/../../x", "a/b", "/etc", "a\0b", "", ".x", "a\\b", "x" * 300, "a\n"]
NAMED: list[tuple[str, Any]] = [
    ("save", Save(name="NAME")),
    ("load", Load(name="NAME")),
    ("export", Export(name="NAME")),
    ("delete", Delete(name="NAME")),
    ("list_files", ListFiles(kind="checkpoint", name="NAME")),
    ("read_file", ReadFile(kind="checkpoint", name="NAME", path="x", offset=0, length=1)),
]


def renamed(frame: bytes, **strings: str) -> bytes:
    """A frame with these JSON strings in the place of others."""
    length = int.from_bytes(frame[4:8], "little")
    header = frame[8 : 8 + length].decode()
    for old, new in strings.items():
        header = header.replace(json.dumps(old), json.dumps(new))
    start = b"RRL1" + len(header.encode()).to_bytes(4, "little") + header.encode()
    return start + bytes(-len(start) % 64)


@pytest.mark.parametrize(("operation", "request_"), NAMED, ids=lambda each: str(each)[:10])
@in_loop
async def test_names_that_leave_their_directory_are_refused(
    operation: str, request_: Any, tmp_path: Path
) -> None:
    async with served(checkpoint_dir=tmp_path / "run") as run:
        await run.attach()
        before = sorted(tmp_path.rglob("*"))
        frame = frame_bytes(
            Submit(
                client_id="c",
                instance_id=run.dispatcher.instance_id,
                operation=operation,
                number=1,
                request=request_,
                linger=30.0,
            )
        )
        for name in NAMES:
            status, body, _ = await post(run.url, body=renamed(frame, NAME=name), path="/v1/submit")
            error = decode(body)
            assert (status, type(error)) == (400, InvalidRequestError), (name, error)
        assert sorted(tmp_path.rglob("*")) == before


@in_loop
async def test_no_start_and_no_path_leads_out_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("outside")
    async with served(checkpoint_dir=tmp_path / "run") as run:
        await run.attach()
        assert (await run.ask("save", 1, Save(name="one"))).error is None
        folder = tmp_path / "run" / "checkpoints" / "one"
        (folder / "link").symlink_to(tmp_path / "secret")
        (folder / "folder").symlink_to(tmp_path)
        listed = await run.ask("list_files", 1, ListFiles(kind="checkpoint", name="one"))
        assert not [path for path in listed.result.paths if "link" in path or "secret" in path]
        for number, path in enumerate(
            ("link", "folder/secret", "../../../secret", "/etc/passwd", str(tmp_path / "secret")), 2
        ):
            request = ReadFile(kind="checkpoint", name="one", path=path, offset=0, length=9)
            outcome = await run.ask("read_file", number, request)
            assert isinstance(outcome.error, InvalidRequestError), path
        async with speaking(run.url) as transport:
            for start in ("../one", "/etc", "one/..", "one\0", "..", "link"):
                message = Attach(
                    client_id="d", protocol_versions=PROTOCOL_VERSIONS, start=start, takeover=True
                )
                with pytest.raises(RemoteRLError) as caught:
                    await transport.call(message, LONG)
                assert isinstance(caught.value, InvalidRequestError), start
