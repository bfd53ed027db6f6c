"""A driver that stands still by SIGSTOP for longer than its lease, and goes on: two never train."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
from process_support import NIGHTLY, SMALL, Playground, until

from remote_rl import AdamW, Batch, Session, connect, errors, losses
from remote_rl.messages import Submit
from remote_rl.requests import ForwardBackward
from remote_rl.transports.bodies import FRAME_TYPE
from remote_rl.wire import decode, encode

BATCH = Batch(prompts=[[1]], prompt_index=[0], responses=[[2, 3]], temperature=1.0)
#: trains as fast as it can, and has several operations under way at any time
LOOP = """
import threading

batch = Batch(prompts=[[1]], prompt_index=[0], responses=[[4, 5, 6]], temperature=1.0)
done, last, ended = 0, [], []


def train():
    global done
    try:
        while True:
            rl.training.forward_backward(batch, losses.CrossEntropy())
            last.append(rl.training.optim_step(AdamW(lr=0.5)))
            if len(last) > 3:
                last.pop(0).result()
                done += 1
    except Exception as error:
        ended.append(error)


def names(operations):
    found = []
    for operation in operations:
        try:
            operation.result(60)
        except Exception as error:
            found.append(type(error).__name__)
    return found


held = rl.sampling.generate([[1]], SamplingParams(max_tokens=9))
training = threading.Thread(target=train, daemon=True)
training.start()
"""


def step(rl: Session) -> float:
    """One step, and the norm of its gradient, which depends on all bits of the weights."""
    rl.training.forward_backward(BATCH, losses.CrossEntropy())
    return rl.training.optim_step(AdamW(lr=0.1)).result(60).grad_norm


@pytest.mark.parametrize(("lease", "stopped"), [(2, 0), *([(60, 120)] if NIGHTLY else [])], ids=str)
def test_a_driver_that_stood_still_trains_no_more(
    lease: float, stopped: float, playground: Playground
) -> None:
    with connect("mock", **SMALL) as alone:
        expected = [step(alone) for _ in range(6)]

    server = playground.server("--lease", str(lease), latency={"token": 600.0})
    old = playground.puppet(server.url)
    old.do(LOOP)
    until("the old driver trains", lambda: old.do("done") > 3)
    old.tell("names([held])")  # asked before, answered after
    old.stop()
    with connect(server.url, start="base") as rl:
        first = rl.weights.version().result().trainer
        norms = [step(rl) for _ in range(3)]
        time.sleep(stopped)
        old.go_on()
        assert old.hear()["value"] == ["LeaseError"]
        assert set(old.do("names(last)")) == {"LeaseError"}
        old.do("training.join(60)")
        assert old.do("[type(error).__name__ for error in ended]") == ["LeaseError"]
        old.tell("rl.training.optim_step(AdamW(lr=0.5)).result(60)")
        refused = old.hear()
        assert refused["error"] == "LeaseError"
        assert "holds no lease of the run: not renewed for" in refused["message"]
        assert rl.weights.version().result().trainer == first + 3
        norms += [step(rl) for _ in range(3)]
        assert rl.weights.version().result().trainer == first + 6
    assert norms == expected  # to the last bit, what one driver alone would have done


def test_a_request_whose_second_half_comes_after_the_lease_is_refused(
    playground: Playground,
) -> None:
    """As of a client that stands still while its body is on the way."""
    server = playground.server("--lease", "1")
    old = connect(server.url)
    connection = old._connection
    message = Submit(
        client_id=connection.client_id,
        instance_id=connection.grant.instance_id,
        operation="forward_backward",
        number=1,
        request=ForwardBackward(batch=BATCH, loss=losses.CrossEntropy()),
    )
    body = b"".join(encode(message).parts)
    head = (
        f"POST /v1/submit HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {FRAME_TYPE}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", int(server.port)), timeout=60) as line:
        line.sendall(head.encode() + body[: len(body) // 2])
        old._loop.run(_silenced(connection))  # it says nothing more
        with connect(server.url, start="current") as rl:
            line.sendall(body[len(body) // 2 :])
            answer = b""
            while piece := line.recv(65536):
                answer += piece
            refusal = decode(answer.partition(b"\r\n\r\n")[2])
            assert type(refusal) is errors.LeaseError
            with pytest.raises(errors.ConflictError, match="nothing was accumulated"):
                rl.training.optim_step(AdamW(lr=0.1)).result(60)
    old.detach()


async def _silenced(connection: Any) -> None:
    for task in list(connection._tasks):
        task.cancel()
