"""The backend of a real server raises, hangs, leaves or comes back too late: the right error by
name on the other side, and nothing of it applied later."""

from __future__ import annotations

import asyncio

import pytest
from process_support import Playground

from remote_rl import AdamW, Batch, RunInfo, SamplingParams, connect, errors, losses
from remote_rl.messages import Describe
from remote_rl.transports.http import HttpTransport

SHORT = SamplingParams(max_tokens=2)


def test_what_a_backend_raises_and_an_exit_in_it_are_that_operations_failure(
    playground: Playground, batch: Batch
) -> None:
    server = playground.server(
        backend="staged", faults=[{"operation": "forward", "error": "BackendError"}]
    )
    playground.stage.exits("forward-2-before")
    with connect(server.url) as rl:
        for words in ("a fault that the options of the mock", "SystemExit: 3"):
            with pytest.raises(errors.BackendError, match=words):
                rl.training.forward(batch).result(60)
        rl.training.forward(batch).result(60)  # the third one, and the server lives


def test_a_hanging_generate_fails_alone_and_a_hanging_step_ends_the_run(
    playground: Playground, batch: Batch
) -> None:
    """The step is on a thread and heeds nothing; when it returns, it is too late."""
    server = playground.server(
        *("--stall-timeout", "1", "--lease", "3"),
        backend="staged",
        in_thread=["optim_step", "generate"],
    )
    stage = playground.stage
    rl = connect(server.url)
    rl.training.save("last").result()
    stage.hold("generate-1-before")
    with pytest.raises(errors.StalledError, match="generate reported nothing for 1 s"):
        rl.sampling.generate([[1]], SHORT).result(60)
    rl.training.forward_backward(batch, losses.PPO()).result(60)  # it failed alone
    assert rl.sampling.generate([[1]], SHORT).result(60)

    stage.hold("optim_step-1-before")
    stalled = rl.training.optim_step(AdamW(lr=0.1))
    behind = [rl.training.snapshot("behind"), rl.sampling.generate([[1]], SHORT)]
    behind[1].result(60)
    for operation in (stalled, behind[0]):
        with pytest.raises(errors.RunLostError, match="optim_step reported nothing for") as caught:
            operation.result(60)
        assert caught.value.details == {"last_checkpoint": "last"}
    with pytest.raises(errors.RunLostError) as caught:
        stalled.result()
    assert type(caught.value.__cause__) is errors.StalledError
    assert "killed" in stage.passed()
    with pytest.raises(errors.RunLostError, match="optim_step reported nothing"):
        rl.training.forward(batch)
    stage.release("optim_step-1-before")
    stage.reached("optim_step-1-after")
    described = asyncio.run(info(server.url))
    assert (described.versions.trainer, described.pristine) == (0, False)
    assert "optim_step reported nothing" in str(described.lost)
    rl.detach()
    # the server has told its clients and ends by itself, though the generate still hangs
    assert server.process.wait(60) == 1
    assert "snapshot-1-before" not in stage.passed()


async def info(url: str) -> RunInfo:
    """What the run says of itself to whoever asks."""
    transport = HttpTransport(url)
    try:
        described: RunInfo = await transport.call(Describe(), 30)
    finally:
        await transport.close()
    return described
