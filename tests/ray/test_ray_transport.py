"""What crosses over Ray, how, and what is said where nothing can."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_support import trained
from process_support import NIGHTLY
from ray_support import RayServer, actor_of, in_actor
from witness_backend import FIELDS, LENGTH, LOSS, ROWS, arrays_of, is_in_the_store, large_batch

from remote_rl import connect
from remote_rl.errors import (
    ConflictError,
    InvalidRequestError,
    ProtocolError,
    UnreachableError,
)
from remote_rl.messages import (
    Attach,
    ConnectionLost,
    Describe,
    Grant,
    Message,
    Outcome,
    Submit,
    Wait,
)
from remote_rl.protocol import PROTOCOL_VERSIONS
from remote_rl.requests import ForwardBackward
from remote_rl.server.serve import Limits
from remote_rl.transports.ray import RayTransport
from remote_rl.transports.ray_cluster import Place
from remote_rl.wire import digest


def asked(target: str, question: Any) -> Any:
    """What `question(transport)` gives, on a loop of its own."""

    async def ask() -> Any:
        transport = RayTransport(target)
        try:
            return await question(transport)
        finally:
            await transport.close()

    return asyncio.run(ask())


async def attached(transport: RayTransport, **changes: Any) -> Grant:
    asks = Attach(client_id="c", protocol_versions=PROTOCOL_VERSIONS, **changes)
    grant: Grant = await transport.call(asks, 30)
    return grant


# -- what crosses ---------------------------------------------------------------------------------


def test_a_run_over_ray_gives_the_bits_of_a_run_in_process(cluster: Any) -> None:
    in_process = trained("mock", seed=3)
    # `trained` gives no options to a server, and `serve` makes the mock smaller
    with RayServer("mock", name="bits", seed=3) as server:
        assert trained(server.target) == in_process


def test_a_large_batch_lies_in_the_object_store_on_both_sides(serve: Any) -> None:
    server, batch = serve("witness"), large_batch()
    total = sum(array.sum(dtype=np.float64) for array in arrays_of(batch).values())
    with connect(server.target) as rl:
        result = rl.training.forward_backward(batch, LOSS).result()
        assert {name: result.metrics[name] for name in FIELDS} == dict.fromkeys(FIELDS, 1.0)
        assert result.value == total
        outputs = rl.training.forward(batch).result()
    logprobs = outputs.logprobs.values
    assert is_in_the_store(logprobs)
    np.testing.assert_array_equal(logprobs, -np.arange(ROWS * LENGTH, dtype=np.float32))
    with pytest.raises(ValueError, match="read-only"):
        logprobs[0] = 1
    assert not is_in_the_store(np.zeros(5))


def test_an_operation_is_one_call_whose_answer_carries_the_result(
    server: RayServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Message] = []
    original = RayTransport.call

    async def call(self: RayTransport, message: Message, timeout: float) -> Any:
        sent.append(message)
        return await original(self, message, timeout)

    monkeypatch.setattr(RayTransport, "call", call)
    with connect(server.target) as rl:
        sent.clear()
        for _ in range(5):
            rl.training.zero_grad().result()
        assert [type(each) for each in sent].count(Submit) == 5
        assert not any(isinstance(each, Wait) for each in sent)


def test_the_digest_is_that_of_every_other_transport(serve: Any) -> None:
    batch = large_batch()
    large = ForwardBackward(batch=batch, loss=LOSS)
    small = ForwardBackward(batch=batch.select([0, 3]), loss=LOSS)

    async def question(transport: RayTransport) -> list[Any]:
        grant = await attached(transport)
        leased = {"client_id": "c", "instance_id": grant.instance_id, "linger": 30.0}
        answers = []
        for number, (request, other) in enumerate(((small, large), (large, small)), 1):
            for sent, taken in (
                (request, transport.digest(request)),
                (request, digest(request)),
                (other, digest(other)),
            ):
                message = Submit(
                    operation="forward_backward",
                    number=number,
                    request=sent,
                    digest=taken,
                    **leased,
                )
                try:
                    answers.append(await transport.call(message, 60))
                except ConflictError as conflict:
                    answers.append(conflict)
        return answers

    for first, again, other in np.reshape(asked(serve("witness").target, question), (2, 3)):
        assert isinstance(first, Outcome)
        assert first.done
        assert first == again, "the same digest is the same operation"
        assert isinstance(other, ConflictError)


def test_what_is_given_up_is_cancelled_in_the_actor(server: RayServer) -> None:
    async def question(transport: RayTransport) -> list[int]:
        grant = await attached(transport)
        wait = Wait(client_id="c", instance_id=grant.instance_id, timeout=60)
        counts = []
        for give_up in ("by its timeout", "by its caller"):
            call = asyncio.ensure_future(
                transport.call(wait, 1.0 if give_up == "by its timeout" else 60)
            )
            while not in_actor(server, lambda run: run._answering):
                await asyncio.sleep(0.01)
            counts.append(in_actor(server, lambda run: run._answering))
            if give_up == "by its caller":
                call.cancel()
            with pytest.raises((ConnectionLost, asyncio.CancelledError)):
                await call
            while in_actor(server, lambda run: run._answering):
                await asyncio.sleep(0.01)
        return counts

    assert asked(server.target, question) == [1, 1]


def test_what_is_under_way_when_the_transport_closes_is_given_up_in_time(
    server: RayServer,
) -> None:
    async def question(transport: RayTransport) -> None:
        grant = await attached(transport)
        wait = Wait(client_id="c", instance_id=grant.instance_id, timeout=60)
        call = asyncio.ensure_future(transport.call(wait, 1.0))
        while not in_actor(server, lambda run: run._answering):
            await asyncio.sleep(0.01)
        await transport.close()
        with pytest.raises(ConnectionLost, match="no answer within 1 s"):
            await asyncio.wait_for(call, 30)

    asked(server.target, question)


def test_a_message_that_is_too_large_is_refused_and_the_run_goes_on(serve: Any) -> None:
    server = serve("witness", limits=Limits(max_body=1 << 20, grace=5))
    with connect(server.target) as rl:
        with pytest.raises(InvalidRequestError, match="larger than the 1048576 bytes"):
            rl.training.forward_backward(large_batch(), LOSS).result()
        rl.training.zero_grad().result()


def test_two_thousand_operations_at_once(server: RayServer) -> None:
    with connect(server.target) as rl:
        several = [rl.training.zero_grad() for _ in range(2000)]
        assert all(each.result(120) is not None for each in several)


def test_what_is_no_message_is_refused_by_name(server: RayServer) -> None:
    async def question(transport: RayTransport) -> Any:
        return await transport.call(Place("a"), 30)  # type: ignore[arg-type] - that is the point

    with pytest.raises(InvalidRequestError, match="Place can't cross"):
        asked(server.target, question)
    answer = actor_of(server).answer
    import ray

    from remote_rl.transports.parcels import unpack

    for garbage in (b"garbage", (b"garbage", [])):
        assert isinstance(unpack(ray.get(answer.remote(garbage))), ProtocolError)


# -- names, and what is said where there is nothing -----------------------------------------------


def test_an_actor_of_another_namespace(cluster: Any) -> None:
    with (
        RayServer("mock", name="run.a", namespace="mine", vocab_size=12) as server,
        connect(server.target) as rl,
    ):
        assert server.target == "ray:mine/run.a"
        assert rl.handle().url == server.target
        assert "ray:mine/run.a" in repr(rl)
        with pytest.raises(UnreachableError, match=r"no actor 'run\.a' in namespace 'remote_rl'"):
            connect("ray:run.a")


def test_no_actor_of_the_name_is_said_at_once(cluster: Any) -> None:
    with pytest.raises(UnreachableError, match=r"no actor 'nobody' .* --ray-name nobody"):
        connect("ray:nobody")


def test_a_foreign_actor_is_no_run(cluster: Any, server: RayServer) -> None:
    import ray

    class Foreign:
        def hello(self) -> None: ...

    foreign = ray.remote(Foreign).options(name="foreign", namespace="remote_rl", num_cpus=0)
    actor = foreign.remote()
    with pytest.raises(ProtocolError, match=r"none of remote_rl's"):
        connect("ray:foreign")
    del actor


def test_a_name_that_is_taken(server: RayServer) -> None:
    with pytest.raises(ConflictError, match="already; end it"):
        RayServer("mock", name=server.target.removeprefix("ray:"))
    with connect(server.target) as rl:
        rl.info().result()


def test_a_backend_that_is_still_starting(cluster: Any) -> None:
    import ray

    from remote_rl.server.ray_actor import ServedRun

    options = {"name": "late", "namespace": "remote_rl", "num_cpus": 0}
    actor = ray.remote(ServedRun).options(**options).remote(1 << 20)
    with pytest.raises(ConnectionLost, match="still starting"):
        asked("ray:late", lambda transport: transport.call(Describe(), 60))
    assert ray.get(actor.start.remote("witness", {})) is None
    assert ray.get(actor.doing.remote()) == "opens its eyes"
    described = asked("ray:late", lambda transport: transport.call(Describe(), 60))
    assert described.backend == "witness"


def test_a_backend_that_does_not_start_leaves_no_actor(cluster: Any) -> None:
    with pytest.raises(InvalidRequestError, match="vocab_size"):
        RayServer("mock", name="failed", vocab=3)
    with pytest.raises(UnreachableError, match="no actor 'failed'"):
        connect("ray:failed")
    with pytest.raises(InvalidRequestError, match="'name', which the run itself decides"):
        RayServer("mock", name="failed", actor_options={"name": "other"})


ELSEWHERE = """
from remote_rl import connect, errors
try:
    connect("ray:run")
except errors.RemoteRLError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"RAY_ADDRESS": "127.0.0.1:1"}, "UnreachableError no Ray cluster answers at '127.0.0.1:1"),
        ({"RAY_ADDRESS": "nonsense"}, "UnreachableError no Ray cluster answers at 'nonsense'"),
        ({"RAY_ADDRESS": "ray://host:1"}, "UnsupportedError RAY_ADDRESS 'ray://host:1'"),
        # Ray itself tries for 20 s
        *([({"RAY_AUTH_TOKEN": "0" * 64}, "AuthenticationError the Ray cluster")] * NIGHTLY),
    ],
)
def test_a_cluster_that_can_t_be_joined(
    cluster: Any, changes: dict[str, str], said: str, tmp_path: Path
) -> None:
    """In another process, since this one has joined."""
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE],
        env={**os.environ, **changes},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.startswith(said), done.stdout + done.stderr


# -- loops and threads ----------------------------------------------------------------------------


def test_a_server_and_a_client_inside_a_running_loop(cluster: Any) -> None:
    """As in a notebook."""

    async def cell() -> str:
        with RayServer("mock", name="notebook", vocab_size=12) as server:
            async with connect(server.target) as rl:
                info = await rl.info()
                return str(info.backend)

    assert asyncio.run(cell()) == "mock"


def test_two_sessions_in_threads_of_one_process(server: RayServer) -> None:
    with connect(server.target) as driver:
        heard: list[str] = []

        def member() -> None:
            with connect(driver.handle()) as rl:
                heard.append(rl.role)

        threads = [threading.Thread(target=member) for _ in range(3)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert heard == ["member"] * 3
