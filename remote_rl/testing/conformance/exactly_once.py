"""Testing: what is said twice happens once (imports the contract, base, checks, probe)."""

from __future__ import annotations

import numpy as np

from ...errors import ConflictError, OperationCancelled
from ...losses import CrossEntropy
from ...requests import Forward, ForwardBackward, Generate, OptimStep
from ...types import AdamW, Ragged
from .base import Conformance
from .checks import refuses
from .probe import Probe


class ExactlyOnce(Conformance):
    """Numbers, resent messages, gaps and tombstones, below the session's faces."""

    def test_a_resent_forward_backward_adds_its_gradient_once(self, probe: Probe) -> None:
        """A forward_backward that is said again under its number gives the first one's result and
        changes nothing."""
        probe.needs_training()
        batch = probe.batch()
        norm = probe.gradient_norm(batch, CrossEntropy())
        request = ForwardBackward(batch=batch.only(()), loss=CrossEntropy())
        call = probe.wire.reserve("forward_backward")
        first = probe.wire.outcome(call, request)
        for _ in range(2):
            again = probe.wire.outcome(call, request)
            assert again.value == first.value, "another value the second time"
        probe.wire.acknowledge(call)
        probe.same_norm(probe.applied_norm(), norm, "gradient norm after it was said three times")

    def test_a_resent_optim_step_steps_once(self, probe: Probe) -> None:
        """An optim_step that is said again under its number takes no second step."""
        probe.needs_training()
        batch = probe.batch()
        probe.rl.training.forward_backward(batch, CrossEntropy()).result()
        request = OptimStep(optimizer=AdamW(lr=probe.rate, weight_decay=0.0))
        call = probe.wire.reserve("optim_step")
        first = probe.wire.outcome(call, request)
        after = probe.rl.training.forward(batch).result()
        again = probe.wire.outcome(call, request)
        assert (again.version, again.grad_norm) == (first.version, first.grad_norm)
        later = probe.rl.training.forward(batch).result()
        assert later.version == after.version == first.version
        probe.same(later.logprobs.values, after.logprobs.values, "logprobs after it was said again")
        probe.wire.acknowledge(call)

    def test_a_resent_generate_draws_once(self, probe: Probe) -> None:
        """A generate that is said again gives the first one's samples."""
        probe.needs("generate")
        request = Generate(prompts=Ragged.of(probe.prompts, np.int32), params=probe.params(n=2))
        call = probe.wire.reserve("generate")
        first = probe.wire.outcome(call, request)
        again = probe.wire.outcome(call, request)
        assert again.tokens == first.tokens
        probe.wire.acknowledge(call)

    def test_a_number_is_good_for_one_request(self, probe: Probe) -> None:
        """Another request under a number that was used is a ConflictError and never runs."""
        probe.needs_training()
        batch = probe.batch()
        norm = probe.gradient_norm(batch, CrossEntropy())
        call = probe.wire.reserve("forward_backward")
        request = ForwardBackward(batch=batch.only(()), loss=CrossEntropy())
        other = ForwardBackward(batch=batch.only(()), loss=CrossEntropy(scale=5.0))
        probe.wire.outcome(call, request)
        with refuses(ConflictError, str(call.number)):
            probe.wire.outcome(call, other)
        probe.wire.acknowledge(call)
        probe.same_norm(probe.applied_norm(), norm, "gradient norm after the other request")

    def test_an_acknowledged_number_is_over(self, probe: Probe) -> None:
        """A late duplicate of what was acknowledged is a ConflictError, never executed."""
        probe.needs_training()
        batch = probe.batch()
        norm = probe.gradient_norm(batch, CrossEntropy())
        call = probe.wire.reserve("forward_backward")
        request = ForwardBackward(batch=batch.only(()), loss=CrossEntropy())
        probe.wire.outcome(call, request)
        probe.wire.acknowledge(call)
        with refuses(ConflictError, str(call.number)):
            probe.wire.outcome(call, request)
        probe.same_norm(probe.applied_norm(), norm, "gradient norm after the late duplicate")

    def test_a_gap_is_held_until_it_is_filled(self, probe: Probe) -> None:
        """An operation that arrives before its predecessor waits, and runs after it."""
        probe.needs_training()
        batch = probe.batch()
        backward, step = probe.wire.reserve("forward_backward"), probe.wire.reserve("optim_step")
        stepping = OptimStep(optimizer=AdamW(lr=0.0, weight_decay=0.0))
        early = probe.wire.submit(step, stepping, linger=0.05)
        assert not early.done, f"it ran before its predecessor: {early.error or early.result}"
        request = ForwardBackward(batch=batch.only(()), loss=CrossEntropy())
        probe.wire.outcome(backward, request)
        result = probe.wire.outcome(step, stepping)
        assert result.grad_norm > 0, "the step did not see the gradient before it"
        probe.wire.acknowledge(backward)
        probe.wire.acknowledge(step)

    def test_a_cancelled_number_never_runs(self, probe: Probe) -> None:
        """A number that was cancelled before it came leaves a tombstone: what comes under it later
        does not run, and what comes after it is not held up."""
        probe.needs("forward", output="logprobs")
        call = probe.wire.reserve("forward")
        request = Forward(batch=probe.batch().only(()))
        assert probe.wire.cancel(call).cancelled
        with refuses(OperationCancelled):
            probe.wire.outcome(call, request)
        probe.wire.acknowledge(call)
        probe.logprobs(probe.batch())
