"""A worker process of the engine is killed: its supervisor says so, and every client hears it."""

from __future__ import annotations

import os
import signal

import pytest
from process_support import Playground, ServerProcess, until, within

from remote_rl import AdamW, Batch, SamplingParams, Session, connect, errors, losses


@pytest.fixture
def server(playground: Playground) -> ServerProcess:
    return playground.server(backend="staged", child=True)


def kill_worker(playground: Playground) -> None:
    path = playground.stage.folder / "child"
    until("the worker runs", lambda: path.exists() and path.read_text() != "")
    os.kill(int(path.read_text()), signal.SIGKILL)


def heard_of(session: Session) -> errors.RunLostError:
    """What a session that does nothing has heard."""
    until("the session has heard it", lambda: session._connection.broken is not None, 15)
    assert isinstance(session._connection.broken, errors.RunLostError)
    return session._connection.broken


def test_a_worker_that_dies_while_nothing_runs(
    server: ServerProcess, playground: Playground, batch: Batch
) -> None:
    rl = connect(server.url)
    member = connect(rl.handle())
    rl.training.save("last").result()
    kill_worker(playground)
    for session in (rl, member):
        error = heard_of(session)
        assert "backend 'mock' died: worker process" in str(error)
        assert "ended with code -9" in str(error)
        assert error.details == {"last_checkpoint": "last"}
        with pytest.raises(errors.RunLostError, match="start= 'last', its last checkpoint"):
            session.info()
    assert playground.stage.passed()[-1] == "killed"
    rl.detach()
    member.detach()


def test_a_wait_without_an_end_on_a_worker_that_died__prime_rl_2230(
    server: ServerProcess, playground: Playground, batch: Batch
) -> None:
    rl = connect(server.url)
    stage = playground.stage
    rl.training.save("last").result()
    for held in ("forward_backward-1-before", "generate-1-before"):
        stage.hold(held)
    operations = [
        rl.training.forward_backward(batch, losses.PPO()),
        rl.training.optim_step(AdamW(lr=0.1)),
        rl.sampling.generate([[1]], SamplingParams(max_tokens=4)),
    ]
    for held in ("forward_backward-1-before", "generate-1-before"):
        stage.reached(held)
    kill_worker(playground)
    with within(15):
        for operation in operations:
            with pytest.raises(errors.RunLostError, match="ended with code -9") as caught:
                operation.result(60)
            assert caught.value.details == {"last_checkpoint": "last"}
    assert "optim_step-1-before" not in stage.passed()
    rl.detach()
