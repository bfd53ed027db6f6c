"""The server's process is killed, exits, stands still or comes back: what its clients hear."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from process_support import Playground, until, within

from remote_rl import AdamW, Batch, SamplingParams, connect, errors, losses

LONG = SamplingParams(max_tokens=100)


def test_the_death_of_a_server_is_noticed_within_fifteen_seconds(
    playground: Playground, batch: Batch
) -> None:
    """With the lease of 60 s that servers have, by whoever waits and by whoever does nothing."""
    server = playground.server(latency={"token": 60.0})
    waiting = connect(server.url)
    idle = connect(waiting.handle())
    waiting.training.save("first").result()
    waiting.training.save("second").result()
    operation = waiting.sampling.generate([[1]], LONG)
    server.kill()
    with within(15):
        with pytest.raises(errors.UnreachableError, match="its server has ended") as caught:
            operation.result(60)
        until("the idle one has noticed", lambda: idle._connection.broken is not None)
    assert caught.value.details == {"last_checkpoint": "second"}
    assert "start='second', the last checkpoint that this client saw" in str(caught.value)
    with pytest.raises(errors.UnreachableError, match=r"start='base' \(this client saw no") as none:
        idle.info()
    assert none.value.details == {"last_checkpoint": None}
    waiting.detach()
    idle.detach()


@pytest.mark.parametrize("operation", ["forward_backward", "save"])
def test_a_server_that_exits_in_an_operation(
    operation: str, playground: Playground, batch: Batch
) -> None:
    """As by os._exit, a segmentation fault or the machine's lack of memory."""
    faults = [{"operation": operation, "error": "exit"}]
    server = playground.server("--lease", "1", faults=faults)
    rl = connect(server.url)
    submitted = {
        "forward_backward": lambda: rl.training.forward_backward(batch, losses.PPO()),
        "save": lambda: rl.training.save("never"),
    }[operation]()
    with within(15), pytest.raises(errors.UnreachableError, match="its server has ended"):
        submitted.result(60)
    assert server.process.wait(60) == 70
    rl.detach()


def test_a_server_that_comes_back_at_once_is_another_run(
    playground: Playground, batch: Batch
) -> None:
    server = playground.server(latency={"token": 60.0})
    rl = connect(server.url)
    rl.training.save("last").result()
    held = rl.sampling.generate([[1]], LONG)
    server.kill()
    again = playground.server(port=server.port)
    with within(15), pytest.raises(errors.RunLostError, match="the server was restarted") as caught:
        held.result(60)
    assert caught.value.details == {"last_checkpoint": "last"}
    with pytest.raises(errors.RunLostError):
        rl.training.forward(batch)
    rl.detach()
    connect(again.url, start="last").close()


def test_a_server_that_stands_still_is_waited_for_a_leases_length(
    playground: Playground, batch: Batch
) -> None:
    """It may come back, and its run with it; whoever gave up lost only the lease."""
    server = playground.server("--lease", "2", latency={"token": 60.0})
    rl = connect(server.url)
    rl.training.save("last").result()
    held = rl.sampling.generate([[1]], LONG)
    rl.info().result()
    begin = time.monotonic()
    server.stop()
    with within(15), ThreadPoolExecutor(1) as thread:
        other = thread.submit(connect, server.url)
        with pytest.raises(errors.UnreachableError, match="lease has ended") as caught:
            held.result(60)
        assert time.monotonic() - begin > 1.5  # the last contact lies a moment before
        assert caught.value.details == {"last_checkpoint": "last"}
        with pytest.raises(errors.UnreachableError, match="nothing answers at"):
            other.result(60)
    server.go_on()
    with connect(server.url) as later:  # the first one's lease has to run out
        assert later.training.checkpoints().result()[0].name == "last"
    rl.detach()


def test_time_in_which_the_server_stood_still_ends_nothing(
    playground: Playground, batch: Batch
) -> None:
    """Neither a lease, nor what runs as if it had stalled: signs of life waited unread."""
    server = playground.server(
        "--lease", "4", "--stall-timeout", "1.5", backend="staged", latency={"token": 0.01}
    )
    playground.stage.hold("generate-2-before")
    with connect(server.url) as rl:
        assert rl.sampling.generate([[1]], LONG).result()  # as much as is heard all the time
        held = rl.sampling.generate([[1]], LONG, deadline=3.0)
        playground.stage.reached("generate-2-before")
        server.stop()
        time.sleep(2.5)  # longer than a stall may last, shorter than a lease
        server.go_on()
        rl.info().result(60)
        playground.stage.release("generate-2-before")
        assert len(held.result(60)[0]) == 1
        rl.training.forward_backward(batch, losses.PPO())
        assert rl.training.optim_step(AdamW(lr=0.1)).result(60).version == 1
