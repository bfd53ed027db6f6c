"""A server that gets anything at all goes on serving, and trains as one that got nothing."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import socket
import threading
from collections.abc import Iterator

import attrs
import pytest
from aiohttp import web
from frame_mutations import FRAMES, changed_json
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_examples import EXAMPLES

from backends.mock import create
from remote_rl import AdamW, Batch, SamplingParams, connect, losses
from remote_rl.dispatcher import Dispatcher
from remote_rl.messages import Attach, Message
from remote_rl.protocol import PROTOCOL_VERSIONS
from remote_rl.server.app import application, runner
from remote_rl.transports.bodies import ROUTES, route_of
from remote_rl.wire import decode, encode

PATIENCE = 60.0
#: what the mock is, in the fuzzed server and beside it
OPTIONS = {"context_length": 64, "vocab_size": 300, "hidden_size": 8, "seed": 5}
MESSAGES = tuple(
    (route_of(type(value)), b"".join(encode(value).parts))
    for value in EXAMPLES
    if isinstance(value, Message)
)
ROUTE = st.sampled_from([*sorted(ROUTES), "/v1/nothing"])


@attrs.define
class Live:
    """A server in a thread of its own. names: client ids of three characters."""

    url: str
    port: int
    dispatcher: Dispatcher
    loop: asyncio.AbstractEventLoop
    names: Iterator[str] = attrs.field(
        factory=lambda: map("".join, itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=3))
    )

    def driver(self) -> bytes:
        """The id of a fresh client that drives the run."""
        name = next(self.names)
        message = Attach(
            client_id=name, protocol_versions=PROTOCOL_VERSIONS, start="current", takeover=True
        )
        attaching = self.dispatcher.handle(message)
        asyncio.run_coroutine_threadsafe(attaching, self.loop).result(PATIENCE)
        return name.encode()

    def send(self, data: bytes, hang_up: bool = False) -> bytes:
        """What the server answers until it closes; a timeout is a hang."""
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE) as connection:
            answer = b""
            try:
                connection.sendall(data)
                if hang_up:
                    connection.shutdown(socket.SHUT_WR)
                while piece := connection.recv(1 << 16):
                    answer += piece
            except (ConnectionError, BrokenPipeError):
                pass  # it need not read what it has refused
            return answer

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of one message."""
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            "Content-Type: application/x-remote-rl-frame\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        start, _, rest = self.send(head.encode() + body).partition(b"\r\n\r\n")
        return int(start.split()[1]), rest

    def healthy(self) -> bool:
        """Whether it says so."""
        answer = self.send(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return answer.startswith(b"HTTP/1.1 200")


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    loop, ready, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    found: list[Live] = []

    async def serve() -> None:
        dispatcher = Dispatcher(create(**OPTIONS))
        dispatcher.instance_id = dispatcher.gate.instance_id = "i-1"  # that of the examples
        await dispatcher.start()
        app_runner = runner(application(dispatcher, max_body=1 << 20), 0.5)
        await app_runner.setup()
        site = web.TCPSite(app_runner, "127.0.0.1", 0)
        await site.start()
        port = app_runner.addresses[0][1]
        found.append(Live(f"http://127.0.0.1:{port}", port, dispatcher, loop))
        ready.set()
        await stop.wait()
        await dispatcher.close()
        await app_runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(PATIENCE)
        yield found[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def prepared(body: bytes, driver: bytes) -> bytes:
    """The frame of an example, of a client that is attached and with no long wait."""
    body = re.sub(rb'"timeout":( ?)20\.0', rb'"timeout":\g<1>0.00', body)
    return body.replace(b'"c-1"', b'"' + driver + b'"')


def answered(live: Live, path: str, body: bytes) -> None:
    status, answer = live.post(path, body)
    assert status in (200, 400, 403, 404, 409, 410, 413, 501), (status, answer)
    decode(answer)  # always a frame
    assert live.healthy()


@settings(max_examples=max(150, settings.default.max_examples))  # type: ignore[union-attr]
@given(ROUTE, FRAMES)
def test_any_frame_at_any_address_is_answered(live: Live, path: str, body: bytes) -> None:
    answered(live, path, prepared(body, live.driver()))


@settings(max_examples=max(150, settings.default.max_examples))  # type: ignore[union-attr]
@given(st.sampled_from(MESSAGES), st.data())
def test_changed_messages_at_their_own_address_are_answered(
    live: Live, message: tuple[str, bytes], data: st.DataObject
) -> None:
    path, body = message
    changed = data.draw(changed_json((body,)))
    answered(live, path, prepared(changed, live.driver()))


@given(
    st.lists(
        st.sampled_from(
            [
                *(b"POST ", b"GET ", b"/v1/renew", b"/healthz", b"/metrics", b" HTTP/1.1", b"\r\n"),
                *(b"\r\n\r\n", b"Host: localhost", b"Content-Length: 5", b"Content-Length: -1"),
                *(b"Transfer-Encoding: chunked", b"Expect: 100-continue", b"5\r\n", b"0\r\n\r\n"),
                *(b"Content-Type: application/x-remote-rl-frame", b"Connection: upgrade", b": "),
                *(b"RRL1", b"\x00", b"\xff\xfe", b"\x16\x03\x01\x02\x00", b"PRI * HTTP/2.0", b"x"),
            ]
        ),
        max_size=14,
    )
)
def test_any_bytes_end_in_an_answer_or_a_closed_connection(live: Live, parts: list[bytes]) -> None:
    live.send(b"".join(parts), hang_up=True)
    assert live.healthy()


def steps(target: str, **options: object) -> list[bytes]:
    """Two steps from the base, as bits."""
    given: list[bytes] = []
    with connect(target, **options) as session:  # type: ignore[arg-type]
        for _ in range(2):
            params = SamplingParams(n=2, max_tokens=5, seed=3)
            groups = session.sampling.generate([[1, 2, 3], [4]], params).result()
            batch = Batch.from_groups(groups, advantages=[1.0, -1.0] * 2)
            session.training.forward_backward(batch, losses.PPO())
            stepped = session.training.optim_step(AdamW(lr=1e-2)).result()
            session.weights.sync().result()
            given += [batch.responses.values.tobytes(), repr(stepped.grad_norm).encode()]
    return given


def test_afterwards_it_trains_as_one_that_got_nothing(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        assert steps(live.url, start="base", takeover=True) == steps("mock", **OPTIONS)
    assert not caplog.records
    status = live.dispatcher.status()
    assert [(each.queued, each.running) for each in status.operations if each.running] == []
