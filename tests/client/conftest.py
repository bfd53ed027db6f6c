"""What the client's tests share: sessions over each transport, servers, a batch or two."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from client_double import Double
from client_server import Server
from client_support import Doorkeeper, ServerFactory, SessionFactory, small_mock

from remote_rl import Batch, Session, connect
from remote_rl.messages import Message
from remote_rl.transports.http import HttpTransport
from remote_rl.transports.inprocess import InProcessTransport


@pytest.fixture(autouse=True)
def end_what_hangs() -> Iterator[None]:
    """A test that waits for ever ends the whole session, with every thread's traceback."""
    faulthandler.dump_traceback_later(180, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def servers() -> Iterator[ServerFactory]:
    """Starts servers that end with the test."""
    started: list[Server] = []

    def start(backend: Any, **options: Any) -> Server:
        started.append(Server(backend, **options))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture(params=["inprocess", "http"])
def session_factory(
    request: pytest.FixtureRequest, servers: ServerFactory
) -> Iterator[SessionFactory]:
    """`session_factory(backend, checkpoint_dir=None)`: a driver's session, over each transport;
    those that a test leaves open are detached."""
    opened: list[Session] = []

    def open_session(backend: Any, *, checkpoint_dir: Path | None = None) -> Session:
        if request.param == "inprocess":
            session = connect(backend, checkpoint_dir=checkpoint_dir)
        else:
            session = connect(servers(backend, checkpoint_dir=checkpoint_dir).url)
        opened.append(session)
        return session

    yield open_session
    for session in opened:
        session.detach()


@pytest.fixture
def double() -> Double:
    """A backend that does what the test says."""
    return Double()


@pytest.fixture
def rl(session_factory: SessionFactory, double: Double) -> Session:
    """A session on `double`."""
    return session_factory(double)


@pytest.fixture
def batch() -> Batch:
    """Two prompts, three responses, every per-token field."""
    return Batch(
        prompts=[[1, 2], [3]],
        prompt_index=[0, 0, 1],
        responses=[[1, 2, 3], [4], [5, 6]],
        temperature=1.0,
        advantages=[[1.0, -1.0, 0.5], [2.0], [0.25, -0.5]],
        old_logprobs=[[-1.0, -2.0, -1.5], [-0.5], [-2.5, -1.0]],
        ref_logprobs=[[-1.5, -1.0, -2.0], [-0.75], [-2.0, -1.25]],
    )


@pytest.fixture
def mock() -> Any:
    """One such backend, not started; its `calls` are the log."""
    return small_mock()


@pytest.fixture
def mocked(session_factory: SessionFactory, mock: Any, tmp_path: Path) -> Session:
    """A session on `mock`, with a directory for checkpoints."""
    return session_factory(mock, checkpoint_dir=tmp_path / "run")


@pytest.fixture
def doorkeeper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Doorkeeper]:
    """Delays messages; all are let go at the end."""
    keeper = Doorkeeper()
    for transport in (InProcessTransport, HttpTransport):
        original = transport.call

        async def call(
            self: Any, message: Message, timeout: float, original: Any = original
        ) -> Any:
            for chosen, hold in keeper.kept:
                if chosen(message):
                    await hold.wait()
            return await original(self, message, timeout)

        monkeypatch.setattr(transport, "call", call)
    yield keeper
    for _, hold in keeper.kept:
        hold.open()


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    """Everything that any client sends from now on."""
    sent: list[Message] = []
    for transport in (InProcessTransport, HttpTransport):
        original = transport.call

        async def call(
            self: Any, message: Message, timeout: float, original: Any = original
        ) -> Any:
            sent.append(message)
            return await original(self, message, timeout)

        monkeypatch.setattr(transport, "call", call)
    return sent
