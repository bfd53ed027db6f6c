"""What once waited for ever, or ended without a word: each is refused, ended or said."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from client_support import ServerFactory, SessionFactory, small_mock

from remote_rl import Batch, SamplingParams, Session, connect, errors, losses

GENERATE = SamplingParams(max_tokens=3)


def test_a_close_with_paused_generates_cancels_them_and_says_so(
    session_factory: SessionFactory,
) -> None:
    rl = session_factory(small_mock())
    rl.sampling.pause().result()
    held = [rl.sampling.generate([[1]], GENERATE) for _ in range(3)]
    with pytest.raises(errors.ConflictError, match=r"paused: 3 generate\(s\) were cancelled"):
        rl.close()
    for operation in held:
        with pytest.raises(errors.OperationCancelled):
            operation.result()


def test_a_new_driver_is_not_held_by_an_old_pause(servers: ServerFactory) -> None:
    url = servers(small_mock()).url
    with connect(url) as first:
        first.sampling.pause().result()
        assert first.info().result().paused
    with connect(url) as second:
        assert not second.info().result().paused
        ((sample,),) = second.sampling.generate([[1]], GENERATE).result(60)
        assert sample.finish_reason in ("length", "stop")


@pytest.mark.parametrize("name", ["forward", "snapshot", "sync"])
def test_a_custom_loss_that_would_wait_for_itself_is_refused(
    mocked: Session, batch: Batch, name: str
) -> None:
    submit: dict[str, Any] = {
        "forward": lambda: mocked.training.forward(batch, policy="reference"),
        "snapshot": lambda: mocked.training.snapshot("a"),
        "sync": lambda: mocked.weights.sync(),
    }

    def function(_: Batch, outputs: Any) -> Any:
        submit[name]().result()

    loss = losses.custom(function, framework=None)
    with pytest.raises(errors.InvalidRequestError, match=f"{name} inside the function of"):
        mocked.training.forward_backward(batch, loss).result(60)
    mocked.training.zero_grad().result()
    submit[name]().result(60)  # from anywhere else it is as legal as ever


def test_a_custom_loss_may_still_sample(mocked: Session, batch: Batch) -> None:
    def function(_: Batch, outputs: Any) -> Any:
        mocked.sampling.generate([[1]], GENERATE).result(60)
        return 1.0, {"logprobs": outputs["logprobs"] * 0 + 1}

    loss = losses.custom(function, framework=None)
    assert mocked.training.forward_backward(batch, loss).result(60).value == 1.0


def test_the_end_of_a_run_ends_the_session_at_once(servers: ServerFactory) -> None:
    server = servers(small_mock())
    rl = connect(server.url)
    rl.sampling.pause().result()
    held = rl.sampling.generate([[1]], GENERATE)
    server.run(server.dispatcher.close())
    with pytest.raises(errors.RunLostError, match="the run was closed"):
        held.result(30)
    with pytest.raises(errors.RunLostError, match="the run was closed"):
        rl.info()
    server.stop()
    began = time.monotonic()
    rl.detach()
    assert time.monotonic() - began < 30  # not a lease's length of trying


LEFT_OPEN = """
import remote_rl
rl = remote_rl.connect("mock")
rl.sampling.pause().result()
rl.sampling.generate([[1]], remote_rl.SamplingParams(max_tokens=3))
"""


def test_a_program_that_ends_without_closing_is_told_what_it_lost(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(LEFT_OPEN)
    result = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=True
    )
    assert "RuntimeWarning: the program ended without closing Session('mock'" in result.stderr
    assert "1 operation(s) had not ended" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (("localhost:7700",), {}, rr"did you mean 'http://localhost:7700'"),
        ((None,), {}, "a target is a backend's name"),
        (("mock",), {"takeover": True}, "takeover= is for a server"),
        (("mock",), {"stall_timeout": -1}, "stall_timeout must be a number of seconds above 0"),
        (("mock",), {"stall_timeout": "5"}, "stall_timeout must be a number of seconds above 0"),
        (("http://127.0.0.1:1",), {"strat": "base"}, "did you mean 'start'"),
        (("http://127.0.0.1:1",), {"token": "a\nb"}, "characters that can't be sent"),
    ],
)
def test_what_connect_cannot_do_is_said_before_it_tries(
    arguments: tuple[Any, ...], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(errors.InvalidRequestError, match=said):
        connect(*arguments, **options)


def test_what_is_no_batch_or_no_loss_is_said_at_the_call(mocked: Session, batch: Batch) -> None:
    wrong: Any
    for wrong in ([1], None, {"prompts": []}):
        with pytest.raises(errors.InvalidRequestError, match="must be a remote_rl.Batch"):
            mocked.training.forward_backward(wrong, losses.PPO())
        with pytest.raises(errors.InvalidRequestError, match="must be a remote_rl.Batch"):
            mocked.training.forward(wrong)
    for wrong in (losses.PPO, "ppo", None):
        with pytest.raises(errors.InvalidRequestError, match=r"such as losses.PPO\(\)"):
            mocked.training.forward_backward(batch, wrong)
    with pytest.raises(errors.InvalidRequestError, match=r"such as \[\[1, 2\], \[3\]\]"):
        mocked.sampling.generate([1, 2, 3], GENERATE)
    assert "logprobs" in mocked.training.forward(batch, outputs="logprobs").result(60).values
