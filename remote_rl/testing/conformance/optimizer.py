"""Testing: the optimizer's knobs, each honoured with every call (imports the contract, base,
checks, probe)."""

from __future__ import annotations

import math

from ...errors import ConflictError
from ...losses import CrossEntropy
from ...types import AdamW
from .base import Conformance
from .checks import refuses
from .probe import Floats, Probe
from .steps import downhill

UPHILL = CrossEntropy(scale=-1.0)


class Optimizer(Conformance):
    """AdamW by what is known of it: invariances, limits and differences."""

    def test_a_learning_rate_of_zero_changes_nothing(self, probe: Probe) -> None:
        """With lr=0 no weight moves, whatever the decay, which is multiplied by it."""
        probe.needs_training()
        batch = probe.batch()
        before = probe.logprobs(batch)
        probe.train(batch, lr=0.0, weight_decay=0.5)
        probe.same(probe.logprobs(batch), before, "logprobs after a step with lr=0")

    def test_the_learning_rate_is_that_of_each_call(self, probe: Probe) -> None:
        """A larger lr moves the weights further, from one call to the next."""
        probe.needs_training()
        probe.needs("reset")
        batch = probe.batch()
        before = probe.logprobs(batch)
        probe.train(batch, lr=0.1 * probe.rate)
        near = abs(probe.logprobs(batch) - before).max()
        probe.rl.reset().result()
        probe.train(batch, lr=0.0)
        probe.train(batch, lr=0.3 * probe.rate)
        far = abs(probe.logprobs(batch) - before).max()
        assert far > 1.5 * near, f"three times the lr moved logprobs by {far:g}, one by {near:g}"

    def test_weight_decay_shrinks_the_weights(self, probe: Probe) -> None:
        """Weight decay is applied, decoupled from the gradient and times lr."""
        probe.needs_training()
        probe.needs("reset")
        batch = probe.batch()
        kept, halved = (_decayed(probe, decay) for decay in (0.0, 0.5 / probe.rate))
        probe.differ(kept, halved, "logprobs after steps without and with weight_decay")
        ends = []
        for rate, decay in ((probe.rate, 0.5 / probe.rate), (2 * probe.rate, 0.25 / probe.rate)):
            probe.rl.reset().result()
            probe.train(batch, CrossEntropy(scale=0.0), lr=rate, weight_decay=decay)
            ends.append(probe.logprobs(batch))
        probe.same(ends[1], ends[0], "two decays of one lr x weight_decay, without a gradient")

    def test_betas_are_those_of_each_call(self, probe: Probe) -> None:
        """A fresh optimizer's first step is the same for all betas, by its bias correction; a
        second one on another gradient is not."""
        probe.needs_training()
        probe.needs("reset")
        batch, firsts, seconds = probe.batch(), [], []
        for betas in ((0.9, 0.999), (0.2, 0.5)):
            probe.rl.reset().result()
            probe.train(batch, betas=betas)
            firsts.append(probe.logprobs(batch))
            probe.train(batch, UPHILL, betas=betas)
            seconds.append(probe.logprobs(batch))
        probe.same(firsts[1], firsts[0], "logprobs after a first step with other betas")
        probe.differ(seconds[1], seconds[0], "logprobs after a second step with other betas")

    def test_eps_is_added_to_the_root_of_the_second_moment(self, probe: Probe) -> None:
        """An eps that drowns the gradient makes a step proportional to lr / eps."""
        probe.needs_training()
        probe.needs("reset")
        batch = probe.batch()
        norm = probe.gradient_norm(batch, CrossEntropy())
        knobs = downhill(_length(probe, norm), norm)
        ends = []
        for factor, eps_factor in ((1.0, 1.0), (10.0, 10.0), (1.0, 10.0)):
            probe.rl.reset().result()
            lr, eps = knobs["lr"] * factor, knobs["eps"] * eps_factor
            probe.train(batch, **{**knobs, "lr": lr, "eps": eps})
            ends.append(probe.logprobs(batch))
        moved = abs(ends[2] - ends[0]).max()
        far = abs(ends[1] - ends[0]).max()
        probe.differ(ends[2], ends[0], "logprobs after steps of two eps")
        assert far <= 0.01 * moved + probe.tolerance, f"lr and eps times ten moved by {far:g} more"

    def test_max_grad_norm_scales_the_gradient(self, probe: Probe) -> None:
        """A clipped gradient is the whole one scaled down to the norm; one below it is left
        alone."""
        probe.needs_training()
        probe.needs("reset")
        batch = probe.batch()
        norm = probe.gradient_norm(batch, CrossEntropy())
        knobs = downhill(_length(probe, norm), norm)
        ends = {}
        for name, scale, limit in (
            ("whole", 1.0, None),
            ("below the limit", 1.0, 4 * norm),
            ("clipped", 1.0, norm / 4),
            ("scaled", 0.25, None),
        ):
            probe.rl.reset().result()
            probe.train(batch, CrossEntropy(scale=scale), **knobs, max_grad_norm=limit)
            ends[name] = probe.logprobs(batch)
        probe.same(ends["below the limit"], ends["whole"], "logprobs with a limit above the norm")
        probe.same(ends["clipped"], ends["scaled"], "logprobs of a clipped and a scaled gradient")
        probe.differ(ends["clipped"], ends["whole"], "logprobs with and without clipping")

    def test_the_gradient_norm_is_that_before_clipping(self, probe: Probe) -> None:
        """grad_norm is of the accumulated gradient, whatever max_grad_norm does to it."""
        probe.needs("forward_backward", "optim_step", loss="CrossEntropy")
        batch = probe.batch()
        norm = probe.gradient_norm(batch, CrossEntropy())
        probe.rl.training.forward_backward(batch, CrossEntropy()).result()
        clipping = AdamW(lr=0.0, weight_decay=0.0, max_grad_norm=norm / 8)
        result = probe.rl.training.optim_step(clipping).result()
        probe.same_norm(result.grad_norm, norm, "grad_norm of a clipped step")

    def test_a_gradient_that_is_not_finite_skips_the_step(self, probe: Probe) -> None:
        """A step on infinities says that it was skipped, and leaves weights, moments and version
        alone and no gradient behind."""
        probe.needs_training()
        probe.needs("reset")
        batch = probe.batch()
        before = probe.rl.training.forward(batch).result()
        skipped = probe.train(batch, CrossEntropy(scale=1e200))
        assert skipped.skipped, f"a gradient of norm {skipped.grad_norm} was applied"
        assert not math.isfinite(skipped.grad_norm), f"skipped at norm {skipped.grad_norm}"
        assert skipped.version == before.version, "a skipped step rose the version"
        after = probe.logprobs(batch)
        probe.same(after, before.logprobs.values, "logprobs after a skipped step")
        with refuses(ConflictError, "optim_step"):
            probe.rl.training.optim_step(AdamW(lr=0.0)).result()
        ends = [_two_steps(probe)]
        probe.rl.reset().result()
        ends.append(_two_steps(probe))
        probe.same(ends[0], ends[1], "logprobs of steps after a skipped one and of a fresh run's")


def _decayed(probe: Probe, decay: float) -> Floats:
    probe.rl.reset().result()
    for _ in range(2):  # adapters begin at zero, where a decay shows nothing
        probe.train(probe.batch())
    probe.train(probe.batch(), weight_decay=decay)
    return probe.logprobs(probe.batch())


def _two_steps(probe: Probe) -> Floats:
    for loss in (CrossEntropy(), UPHILL):
        assert not probe.train(probe.batch(), loss).skipped
    return probe.logprobs(probe.batch())


def _length(probe: Probe, norm: float) -> float:
    value = probe.value(probe.batch(), CrossEntropy())
    return 0.05 * max(1.0, value) / norm**2
