"""Testing: what operations say that they have computed (imports pytest, numpy, the contract,
base, probe)."""

from __future__ import annotations

import numpy as np
import pytest

from ...losses import CrossEntropy
from ...types import AdamW, Batch, Work
from .base import Conformance
from .probe import Probe

#: of two sums of the same numbers in other orders, relatively
_ROUNDING = 1e-9


class Counts(Conformance):
    """The work of training operations, where the backend counts it."""

    def test_what_is_computed_is_counted(self, probe: Probe) -> None:
        """A forward has tokens and FLOPs (or the reason why they are unknown), a forward_backward
        of the same batch as many tokens and more FLOPs, an optimizer's step neither; each took
        time."""
        probe.needs_training()
        batch = probe.batch()
        forward = _forward(probe, batch)
        backward = probe.rl.training.forward_backward(batch, CrossEntropy())
        step = probe.rl.training.optim_step(AdamW(lr=probe.rate))
        both, stepped = backward.result().work, step.result().work
        assert both is not None, "a forward is counted, and a forward_backward is not"
        assert stepped is not None, "a forward is counted, and an optim_step is not"
        assert forward.tokens == both.tokens, f"{forward.tokens} and {both.tokens} tokens"
        assert forward.tokens > 0, "no tokens"
        assert min(forward.seconds, both.seconds, stepped.seconds) > 0, "no time was measured"
        assert (stepped.tokens, stepped.flops) == (0, 0.0), f"an optimizer's step counts {stepped}"
        assert forward.reason == both.reason
        if forward.flops is not None and both.flops is not None:
            assert 0 < forward.flops < both.flops, f"{forward.flops:g}, {both.flops:g} FLOPs"

    def test_counts_of_parts_add_up(self, probe: Probe) -> None:
        """Rows of different prompts need together what they need alone, in whatever pieces the
        backend computes them."""
        probe.needs("forward")
        batch = _many(probe)
        works = [
            _forward(probe, batch.select(np.flatnonzero(batch.prompt_index == prompt)))
            for prompt in range(len(batch.prompts))
        ]
        _same(_forward(probe, batch), Work.total(works), "a batch, and its rows by prompt")

    def test_counts_do_not_depend_on_the_order_of_rows(self, probe: Probe) -> None:
        """A batch needs the same in any order of its rows, also where rows of one prompt come to
        lie in different pieces."""
        probe.needs("forward")
        batch = _many(probe)
        order = np.argsort(batch.prompt_index, kind="stable")
        _same(_forward(probe, batch), _forward(probe, batch.select(order)), "rows in two orders")

    def test_counts_grow_with_the_batch(self, probe: Probe) -> None:
        """One row more costs more; on a prompt that is there already, not more than alone."""
        probe.needs("forward")
        batch = _many(probe)
        rows = np.flatnonzero(batch.prompt_index == 0)
        less, more = _forward(probe, batch.select(rows[:-1])), _forward(probe, batch.select(rows))
        alone = _forward(probe, batch.select(rows[-1:]))
        assert less.tokens < more.tokens <= less.tokens + alone.tokens, (
            f"{more.tokens} tokens, without one row {less.tokens}, and that alone {alone.tokens}"
        )
        if less.flops is not None and more.flops is not None and alone.flops is not None:
            most = (less.flops + alone.flops) * (1 + _ROUNDING)
            assert less.flops < more.flops <= most, f"{less.flops:g}, {more.flops:g} FLOPs"


def _forward(probe: Probe, batch: Batch) -> Work:
    work = probe.rl.training.forward(batch).result().work
    if work is None:
        pytest.skip(f"backend {probe.info.backend!r} does not declare the results' field 'work'")
    return work


def _many(probe: Probe) -> Batch:
    """24 responses of two and three tokens over three prompts, those of a prompt apart."""
    ids = probe.ids(60, seed=8)
    return Batch(
        prompts=probe.prompts,
        prompt_index=[row % 3 for row in range(24)],
        responses=[ids[row : row + 2 + row % 2] for row in range(24)],
        temperature=1.0,
    )


def _same(left: Work, right: Work | None, what: str) -> None:
    assert right is not None
    assert left.tokens == right.tokens, f"{what}: {left.tokens} and {right.tokens} tokens"
    if left.flops is None or right.flops is None:
        assert left.flops == right.flops, f"{what}: {left.flops} and {right.flops} FLOPs"
    else:
        far = abs(left.flops - right.flops) / max(left.flops, right.flops, 1.0)
        assert far <= _ROUNDING, f"{what}: {left.flops:g} and {right.flops:g} FLOPs"
