"""What operations have cost, as a client sees it: counted by the mock, on every transport."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from client_support import SMALL, small_mock

from remote_rl import AdamW, Batch, Devices, Session, Work, connect, losses, mfu
from remote_rl.cli import main
from remote_rl.testing import LoopbackServer

PEAK = 1e12
#: of a position of `SMALL`: 8 hidden units of 2 tokens back with 4 numbers each, and 12 ids
FORWARD = 2 * 8 * (2 * 4 + 12)
BATCH = Batch(
    prompts=[[1, 2, 3], [4]],
    prompt_index=[0, 0, 1],
    responses=[[5, 6], [7], [8, 9, 10]],
    temperature=1.0,
)
TOKENS = 6


def works(rl: Session) -> list[Work | None]:
    """Of a forward, a forward_backward and a step."""
    forward = rl.training.forward(BATCH)
    backward = rl.training.forward_backward(BATCH, losses.CrossEntropy())
    step = rl.training.optim_step(AdamW(lr=0.01))
    return [each.result().work for each in (forward, backward, step)]


def check(rl: Session) -> None:
    forward, backward, step = works(rl)
    assert forward == Work(tokens=TOKENS, flops=TOKENS * FORWARD, seconds=0)
    assert backward == Work(tokens=TOKENS, flops=3 * TOKENS * FORWARD, seconds=0)
    assert step == Work(tokens=0, flops=0, seconds=0)
    total = Work.total([forward, backward, step])
    assert total is not None
    assert 0 < total.seconds < 60
    devices = rl.info().result().devices
    assert devices == Devices(kind="cpu", count=1, dtype="float64", peak_flops=PEAK)
    share, reason = mfu(total, devices)
    assert reason is None
    assert share == 4 * TOKENS * FORWARD / (total.seconds * PEAK)


def test_a_session_sees_what_the_backend_has_counted() -> None:
    with connect(small_mock(peak_flops=PEAK)) as rl:
        check(rl)


def test_a_server_sends_it_along(capsys: pytest.CaptureFixture[str]) -> None:
    server = LoopbackServer(small_mock(peak_flops=PEAK))
    try:
        with connect(server.url, start="base") as rl:
            check(rl)
        assert main(["info", server.url]) == 0
        assert "1 x cpu, training in float64; 1 TFLOP/s each" in capsys.readouterr().out
    finally:
        server.stop()


def test_a_peak_that_is_unknown_has_a_reason() -> None:
    with connect(small_mock()) as rl:
        share, reason = mfu(Work.total(works(rl)), rl.info().result().devices)
    assert share is None
    assert reason is not None
    assert "the option peak_flops gives one" in reason


@pytest.mark.parametrize("rows", [1, 2])
def test_micro_batches_change_no_count(rows: int) -> None:
    with connect(small_mock(micro_batch_rows=rows)) as pieces, connect(small_mock()) as whole:
        assert works(pieces) == works(whole)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_a_skipped_step_has_taken_time_too() -> None:
    with connect(small_mock()) as rl:
        rl.training.forward_backward(BATCH, losses.CrossEntropy(scale=1e200))
        step = rl.training.optim_step(AdamW(lr=0.01)).result()
    assert step.skipped
    assert step.work == Work(tokens=0, flops=0, seconds=0)


def entropy_free(batch: Batch, outputs: dict[str, Any]) -> Any:
    return 0.0, {"logprobs": np.ones(len(outputs["logprobs"]), np.float32)}


def test_a_custom_loss_counts_the_forward_that_it_needed() -> None:
    own = losses.custom(entropy_free, framework=None)
    with connect(small_mock()) as rl:
        held = rl.training.forward(BATCH).result()
        paid = rl.training.forward_backward(BATCH, own).result()
        spared = rl.training.forward_backward(BATCH, own, outputs=held).result()
    assert paid.work == Work(tokens=2 * TOKENS, flops=4 * TOKENS * FORWARD, seconds=0)
    assert spared.work == Work(tokens=TOKENS, flops=3 * TOKENS * FORWARD, seconds=0)


def test_a_backend_that_counts_nothing_says_nothing() -> None:
    class Silent:
        """The mock without its devices."""

        def __init__(self) -> None:
            self._mock = small_mock()

        def __getattr__(self, name: str) -> Any:
            if name == "devices":
                raise AttributeError(name)
            return getattr(self._mock, name)

    with connect(Silent()) as rl:
        assert rl.info().result().devices is None


def test_the_sizes_of_these_tests_are_those_of_the_mock() -> None:
    named = ("window", "embedding_size", "hidden_size", "vocab_size")
    assert [SMALL[name] for name in named] == [2, 4, 8, 12]
