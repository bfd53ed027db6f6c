"""What becomes of a run and its clients when something ends: the actor, a client, an answer."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faults_support
import psutil
import pytest
import ray
from faults_support import KINDS, Ended, end_state, everything, in_process, train
from process_support import Playground, until
from ray_support import RayServer, actor_of, in_actor
from witness_backend import FIELDS, LOSS, large_batch

from remote_rl import SamplingParams, Session, connect
from remote_rl.errors import LeaseError, RunLostError, UnreachableError
from remote_rl.server.serve import Limits

#: Ray says so at once; this is for a machine that is busy
AT_ONCE = 8.0
SLOW = {"latency": {"token": 60.0}}


def kill_by_ray(server: RayServer) -> None:
    ray.kill(actor_of(server))


def kill_the_process(server: RayServer) -> None:
    os.kill(in_actor(server, lambda run: __import__("os").getpid()), signal.SIGKILL)


@pytest.mark.parametrize("kill", [kill_by_ray, kill_the_process])
def test_the_death_of_the_actor_is_said_at_once(
    serve: Any, tmp_path: Path, kill: Callable[[RayServer], None]
) -> None:
    server = serve(checkpoint_dir=tmp_path, **SLOW)
    session = connect(server.target)
    session.training.save("kept").result()
    drawn = session.sampling.generate([[1]], SamplingParams(max_tokens=9))
    session.info().result()
    began = time.monotonic()
    kill(server)
    with pytest.raises(UnreachableError, match="has ended, and the run with it") as told:
        drawn.result(60)
    assert time.monotonic() - began < AT_ONCE
    assert told.value.details["last_checkpoint"] == "kept"
    with pytest.raises(UnreachableError):
        session.training.zero_grad()
    session.detach()
    with pytest.raises(UnreachableError, match=r"no actor|what served at ray:.* has ended"):
        connect(server.target)


def test_an_idle_client_notices_too(server: RayServer) -> None:
    session = connect(server.target)
    kill_by_ray(server)
    until("it has noticed", lambda: session._connection.broken is not None, AT_ONCE)
    assert isinstance(session._connection.broken, UnreachableError)
    session.detach()


def test_a_process_that_leaves_the_cluster_is_told(
    server: RayServer, playground: Playground
) -> None:
    puppet = playground.puppet(server.target)
    puppet.do("import ray; ray.shutdown()")
    puppet.tell("rl.training.zero_grad().result(60)")
    answer = puppet.hear()
    assert answer["error"] == "UnreachableError"
    assert "left the Ray cluster" in answer["message"]


def test_the_next_driver_is_let_in_when_the_lease_of_a_killed_one_ends(
    serve: Any, playground: Playground
) -> None:
    server = serve(limits=Limits(lease=2.0, grace=5))
    killed = playground.puppet(server.target)
    killed.do('rl.training.snapshot("held").result()')
    killed.do("drawn = rl.sampling.generate([[1]], SamplingParams(max_tokens=9))")
    killed.kill()
    with connect(server.target, start="current") as rl:  # waits for the lease's end
        rl.training.restore_snapshot("held").result()
        assert rl._connection.grant.epoch == 2


def test_a_handle_is_used_by_a_second_process(server: RayServer, playground: Playground) -> None:
    with connect(server.target) as driver:
        member = playground.puppet(driver.handle().to_json())
        assert member.do("rl.role") == "member"
        drawn = member.do(
            "rl.sampling.generate([[1, 2]], SamplingParams(max_tokens=5, seed=1))"
            ".result()[0].samples[0].tokens.tolist()"
        )
        mine = driver.sampling.generate([[1, 2]], SamplingParams(max_tokens=5, seed=1)).result()
        assert drawn == mine[0].samples[0].tokens.tolist()
        member.do("rl.close()")


def test_a_revoked_driver_is_told(server: RayServer) -> None:
    first = connect(server.target)
    with connect(server.target, takeover=True, start="current"):
        with pytest.raises(LeaseError):
            first.training.zero_grad().result()
        first.detach()


def test_a_stop_tells_those_who_wait_that_the_run_is_over(serve: Any, tmp_path: Path) -> None:
    slow = {"latency": {"token": 60.0, "zero_grad": 60.0}}
    server = serve(limits=Limits(grace=0.2), checkpoint_dir=tmp_path, **slow)
    session = connect(server.target)
    session.training.save("first").result()
    drawn = session.sampling.generate([[1]], SamplingParams(max_tokens=9))
    step = session.training.zero_grad()
    session.info().result()
    server.stop()
    assert drawn.result(60)[0].samples[0].finish_reason == "abort"
    with pytest.raises(RunLostError, match=r"stopped by its operator.*'first'"):
        step.result(60)
    session.detach()


def test_a_lost_run_is_told_to_everyone_who_asks(serve: Any) -> None:
    """A stall that nothing ends: the engine is killed, and the run with it."""
    server = serve(limits=Limits(stall=0.5, grace=5), latency={"zero_grad": 60.0})
    with connect(server.target) as rl, pytest.raises(RunLostError):
        rl.training.zero_grad().result(60)
    with pytest.raises(RunLostError):
        connect(server.target, start="current")


def test_an_array_outlives_its_actor(serve: Any) -> None:
    server = serve("witness")
    with connect(server.target) as rl:
        logprobs = rl.training.forward(large_batch()).result().logprobs.values
    server.stop()
    assert float(logprobs[-1]) == 1 - len(logprobs)


# -- a second node --------------------------------------------------------------------------------


@pytest.fixture
def node(cluster: Any) -> Iterator[psutil.Process]:
    """Another node of the cluster, with the resource "elsewhere"; its processes end with it."""
    options = "--num-cpus=1", "--object-store-memory=200000000", "--block"
    elsewhere = f"--address={cluster.address}", '--resources={"elsewhere": 1}'
    with (cluster.folder / "node.log").open("w") as log:
        started = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", *elsewhere, *options],
            stdout=log,
            stderr=log,
            env=cluster.environment,
        )
    with started:
        process = psutil.Process(started.pid)
        yield process
        kill_the_tree(process)


def kill_the_tree(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


def test_an_actor_on_another_node_and_the_death_of_that_node(
    serve: Any, node: psutil.Process
) -> None:
    server = serve("witness", actor_options={"resources": {"elsewhere": 1}})
    session = connect(server.target)
    assert (
        in_actor(server, lambda run: __import__("ray").get_runtime_context().get_node_id())
        != ray.get_runtime_context().get_node_id()
    )
    batch = large_batch()
    result = session.training.forward_backward(batch, LOSS).result()
    assert {name: result.metrics[name] for name in FIELDS} == dict.fromkeys(FIELDS, 1.0)
    kill_the_tree(node)
    # Ray's health checks take 15 s and more to be sure
    until("it has noticed", lambda: session._connection.broken is not None, 55.0)
    assert isinstance(session._connection.broken, UnreachableError)
    session.detach()


# -- every fault between client and actor ---------------------------------------------------------

FAULTY = 60  # operations


@pytest.mark.parametrize("seed", range(2))
def test_no_fault_changes_a_bit(serve: Any, tmp_path: Path, seed: int) -> None:
    faults = everything(seed, **dict.fromkeys(KINDS, 0.05))
    server = serve(checkpoint_dir=tmp_path / "ray", **faults_support.SMALL)

    def program(rl: Session) -> list[Any]:
        return train(rl, FAULTY)

    expected = in_process(tmp_path / "local", program)
    with connect(server.target, wrap_transport=faults.wrap) as rl:
        found = Ended(program(rl), end_state(rl, tmp_path / "ray"))
    assert found == expected
    assert sum(faults.injected[kind] for kind in KINDS) > 10, faults.injected
