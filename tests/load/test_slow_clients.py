"""A client that takes nothing, or sends nothing more, holds nobody else up, and not for ever."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from load_backend import Light
from load_server import Served, wait_until

from remote_rl import Batch, SamplingParams, connect, losses
from remote_rl.messages import Attach, Grant, Submit
from remote_rl.requests import Forward
from remote_rl.transports.bodies import FRAME_TYPE, route_of
from remote_rl.wire import decode, encode

Serve = Callable[..., Served]
SMALL = Batch(prompts=[[1, 2]], prompt_index=[0], responses=[[1, 2, 3]], temperature=1.0)
#: answered with 32 MB, more than sockets hold back
LARGE = Batch(
    prompts=[[1]] * 8,
    prompt_index=np.arange(8),
    responses=np.ones((8, 1 << 20), np.int32),
    temperature=1.0,
)


class Raw:
    """A client that speaks to the server by its own sockets."""

    def __init__(self, server: Served, epoch: int | None = None) -> None:
        self.server = server
        instance = None if epoch is None else server.dispatcher.instance_id
        asked = Attach(client_id="raw", protocol_versions=(1,), instance_id=instance, epoch=epoch)
        with self.send(asked) as connection:
            self.grant: Grant = decode(whole_body(connection))

    def send(self, message: Any, first: int | None = None) -> socket.socket:
        """A connection over which the message, or its `first` bytes, has been sent."""
        frame = encode(message)
        body = b"".join(bytes(part) for part in frame.parts)[:first]
        head = (
            f"POST {route_of(type(message))} HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Type: {FRAME_TYPE}\r\nContent-Length: {frame.nbytes}\r\n\r\n"
        )
        # only now: the server waits for a second, and a busy machine needs a part of it
        connection = socket.create_connection(("127.0.0.1", self.server.port))
        try:
            connection.sendall(head.encode() + body)
        except OSError:
            connection.close()
            raise
        return connection

    def submit(self, number: int, batch: Batch, **options: Any) -> Submit:
        """A forward."""
        return Submit(
            client_id="raw",
            instance_id=self.grant.instance_id,
            operation="forward",
            number=number,
            request=Forward(batch=batch),
            digest="d",
            **options,
        )


def whole_body(connection: socket.socket) -> bytes:
    """Of an answer that ends with what its header says."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(1 << 16)
    head, _, body = received.partition(b"\r\n\r\n")
    (length,) = (int(line[16:]) for line in head.split(b"\r\n") if line[:15] == b"Content-Length:")
    while len(body) < length:
        body += connection.recv(1 << 20)
    return body


def is_cut(connection: socket.socket, seconds: float = 60.0) -> bool:
    """Whether the other side ends the connection."""
    connection.settimeout(seconds)
    try:
        while connection.recv(1 << 20):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


def test_a_slow_reader_stops_nobody_else(serve: Serve) -> None:
    """Its answer of 32 MB lies in the server, and everybody else goes on."""
    server = serve(Light())
    with connect(server.url) as rl:
        raw = Raw(server, rl._connection.grant.epoch)
        with raw.send(raw.submit(1, LARGE, linger=30.0)) as connection:
            assert connection.recv(100)  # the answer has begun, and is not taken
            for _ in range(20):
                rl.training.forward_backward(SMALL, losses.CrossEntropy()).result(60)
                rl.sampling.generate([[1]], SamplingParams(max_tokens=4)).result(60)
            assert len(rl.training.forward(LARGE).result(60).logprobs) == 8
            received = 100
            while received < 32 << 20:  # it can still be taken, whole
                received += len(connection.recv(1 << 20))


def test_a_reader_that_takes_nothing_is_given_up_and_may_ask_again(serve: Serve) -> None:
    server = serve(Light(), io_timeout=1.0)
    raw = Raw(server)
    with raw.send(raw.submit(1, LARGE, linger=30.0)) as connection:
        assert connection.recv(100)
        wait_until(lambda: server.connections == 0)  # as a stopped process does
        received = 0
        while piece := received_or_cut(connection):
            received += piece
        assert received < 32 << 20
    with raw.send(raw.submit(1, LARGE, linger=30.0)) as connection:
        outcome = decode(whole_body(connection))
    assert outcome.done
    assert len(outcome.result.logprobs.values) == 8 << 20


def received_or_cut(connection: socket.socket) -> int:
    try:
        return len(connection.recv(1 << 20))
    except ConnectionResetError:
        return 0


@pytest.mark.parametrize("first", [0, 1000, 10 << 20])
def test_a_body_that_stops_coming_is_given_up_and_was_never_accepted(
    serve: Serve, first: int
) -> None:
    server = serve(Light(), io_timeout=1.0)
    raw = Raw(server)
    with raw.send(raw.submit(1, LARGE), first=first) as connection:
        assert is_cut(connection)
    assert not list(server.dispatcher.gate.clients["raw"].records())
    with raw.send(raw.submit(1, LARGE, linger=30.0)) as connection:
        assert decode(whole_body(connection)).done


def test_a_client_that_acknowledges_nothing_waits_alone(serve: Serve) -> None:
    """Its results fill its own budget; the lane is free for the others."""
    server = serve(Light(), budget_bytes=100 << 20)
    with connect(server.url) as rl:
        raw = Raw(server, rl._connection.grant.epoch)
        answers = []
        for number in (2, 3, 4, 5, 6):  # 1 is missing: they are held
            with raw.send(raw.submit(number, LARGE)) as connection:
                answers.append(type(decode(whole_body(connection))).__name__)
        assert answers == ["Outcome", "Outcome", "Busy", "Busy", "Busy"]
        assert server.kept()["raw"] <= 100 << 20
        for _ in range(5):
            assert len(rl.training.forward(SMALL).result(60).logprobs) == 1
