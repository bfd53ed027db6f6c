"""What once waited for ever, or ended without a word: each is refused, ended or said."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from client_double import Double
from client_support import ServerFactory, SessionFactory, small_mock

from remote_rl import AdamW, Batch, SamplingParams, Session, connect, errors, losses
from remote_rl.client import loop as client_loop

SMALL_BATCH: dict[str, Any] = {
    "prompts": [[1]],
    "prompt_index": [0],
    "responses": [[2, 3]],
    "temperature": 1.0,
}
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
        (("localhost:7700",), {}, r"did you mean 'http://localhost:7700'"),
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
        with pytest.raises(errors.InvalidRequestError, match=r"must be a remote_rl\.Batch"):
            mocked.training.forward_backward(wrong, losses.PPO())
        with pytest.raises(errors.InvalidRequestError, match=r"must be a remote_rl\.Batch"):
            mocked.training.forward(wrong)
    for wrong in (losses.PPO, "ppo", None):
        with pytest.raises(errors.InvalidRequestError, match=r"such as losses.PPO\(\)"):
            mocked.training.forward_backward(batch, wrong)
    with pytest.raises(errors.InvalidRequestError, match=r"such as \[\[1, 2\], \[3\]\]"):
        mocked.sampling.generate([1, 2, 3], GENERATE)
    assert "logprobs" in mocked.training.forward(batch, outputs="logprobs").result(60).values


def test_a_pause_ends_with_the_lease_of_whoever_asked_for_it(servers: ServerFactory) -> None:
    url = servers(small_mock()).url
    with connect(url) as driver:
        with connect(driver.handle()) as member:
            member.sampling.pause().result()
        ((sample,),) = driver.sampling.generate([[1]], GENERATE).result(60)
        assert len(sample)


def test_a_pause_that_would_hold_a_waiting_sync_is_refused(rl: Session, double: Double) -> None:
    gate = double.hold("sync")
    sync = rl.weights.sync("wait")
    assert gate.reached.wait(60)
    with pytest.raises(errors.ConflictError, match="pause refused: a sync"):
        rl.sampling.pause().result(60)
    gate.open()
    sync.result(60)


def test_a_session_cannot_be_closed_from_its_own_custom_loss(mocked: Session, batch: Batch) -> None:
    for name in ("close", "detach"):

        def function(_: Batch, outputs: Any, name: str = name) -> Any:
            getattr(mocked, name)()

        loss = losses.custom(function, framework=None)
        with pytest.raises(errors.InvalidRequestError, match=f"{name} inside the function of"):
            mocked.training.forward_backward(batch, loss).result(60)
    mocked.training.zero_grad().result(60)


def test_a_start_that_hangs_is_noticed() -> None:
    from backends.mock import create

    backend = create(faults=[{"operation": "start", "error": "hang"}])
    with pytest.raises(errors.StalledError, match="the start of backend 'mock' reported nothing"):
        connect(backend, stall_timeout=0.2)


def test_a_damaged_checkpoint_costs_nothing_that_is_alive(tmp_path: Path, batch: Batch) -> None:
    with connect(small_mock(), checkpoint_dir=tmp_path) as rl:
        rl.training.save("a").result()
        path = tmp_path / "checkpoints" / "a" / "state" / "weights.safetensors"
        path.write_bytes(path.read_bytes()[:-8])
        with pytest.raises(errors.ConflictError, match="files are damaged"):
            rl.training.load("a").result()
        rl.training.forward(batch).result()
        rl.training.save("rescue").result()


def test_an_update_that_is_not_finite_is_skipped(mocked: Session, batch: Batch) -> None:
    before = mocked.training.forward(batch).result()
    mocked.training.forward_backward(batch, losses.PPO())
    step = mocked.training.optim_step(AdamW(lr=1e300)).result()
    after = mocked.training.forward(batch).result()
    assert (step.skipped, step.version, after.logprobs) == (True, 0, before.logprobs)


def test_held_outputs_must_be_of_the_same_tokens(mocked: Session, batch: Batch) -> None:
    held = mocked.training.forward(batch).result()
    reference = mocked.training.forward(batch, policy="reference").result()
    loss = losses.custom(lambda _, outputs: (0.0, dict(outputs)), framework=None)
    other = batch.replace(responses=[[3, 2, 1], [4], [5, 6]])
    for wrong, outputs in (
        (other, held),
        (batch.replace(temperature=0.5), held),
        (batch, reference),
    ):
        with pytest.raises(errors.InvalidRequestError, match="computed for other tokens"):
            mocked.training.forward_backward(wrong, loss, outputs=outputs)
    mocked.training.forward_backward(batch.replace(advantages=[1, 2, 3]), loss, outputs=held)


def test_a_keyword_that_no_method_has_gets_the_nearest(mocked: Session, batch: Batch) -> None:
    with pytest.raises(errors.UnknownNameError, match="forward has no argument 'deadlin'; did you"):
        mocked.training.forward(batch, deadlin=3)  # type: ignore[call-arg]
    with pytest.raises(errors.UnknownNameError, match="'labl'; did you mean 'label'"):
        mocked.weights.sync(labl=3)  # type: ignore[call-arg]
    with pytest.raises(errors.UnknownNameError, match="close has no argument"):
        mocked.close(now=True)  # type: ignore[call-arg]


def test_a_method_that_heeds_no_cancellation_keeps_nobody_from_leaving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stubborn(Double):
        over = False

        async def optim_step(self, request: Any, context: Any) -> Any:
            while not self.over:
                try:
                    await asyncio.sleep(0.05)
                except asyncio.CancelledError:
                    pass

    monkeypatch.setattr(client_loop, "_PATIENCE", 0.2)
    double = Stubborn()
    rl = connect(double, stall_timeout=0.5)
    rl.training.forward_backward(Batch(**SMALL_BATCH), losses.CrossEntropy())
    with pytest.raises(errors.RunLostError, match="optim_step reported nothing"):
        rl.training.optim_step(AdamW(lr=0.1)).result(60)
    begin = time.monotonic()
    rl.detach()
    assert time.monotonic() - begin < 20
    double.over = True


def test_a_backends_error_of_another_session_does_not_end_this_one(
    session_factory: SessionFactory,
) -> None:
    """An engine that is itself somebody's client may lose its own lease."""
    double = Double()
    for call, error in enumerate(
        (errors.LeaseError("theirs"), errors.UnreachableError("theirs")), start=1
    ):
        double.faults["forward", call] = error
    rl = session_factory(double)
    batch = Batch(**SMALL_BATCH)
    for name in ("LeaseError", "UnreachableError"):
        with pytest.raises(errors.BackendError, match=f"{name}: theirs"):
            rl.training.forward(batch).result(60)
    assert rl.training.forward(batch).result(60).logprobs is not None
