"""Testing: snapshots, the reference policy and reset (imports the contract, base, checks,
probe)."""

from __future__ import annotations

from ...errors import ConflictError, InvalidRequestError
from ...losses import CrossEntropy
from ...types import AdamW
from .base import Conformance
from .checks import refuses
from .probe import Floats, Probe


class Snapshots(Conformance):
    """Weights that are kept beside the current ones."""

    def test_a_snapshot_keeps_the_weights_of_its_time(self, probe: Probe) -> None:
        """A forward of a snapshot gives what the weights gave when it was taken, until dropped."""
        probe.needs_training()
        probe.needs("snapshot", "drop_snapshot", policy="snapshot")
        batch = probe.batch()
        before = probe.logprobs(batch)
        probe.rl.training.snapshot("kept").result()
        probe.train(batch)
        probe.same(probe.logprobs(batch, "kept"), before, "logprobs of the snapshot")
        probe.differ(probe.logprobs(batch), before, "logprobs of the current weights")
        probe.rl.training.drop_snapshot("kept").result()
        with refuses(InvalidRequestError, "kept"):
            probe.rl.training.forward(batch, policy="kept").result()

    def test_a_snapshot_is_restored(self, probe: Probe) -> None:
        """restore_snapshot makes its weights current under a higher version and discards the
        gradient."""
        probe.needs_training()
        probe.needs("snapshot", "restore_snapshot", "drop_snapshot")
        batch = probe.batch()
        before, norm = probe.logprobs(batch), probe.gradient_norm(batch, CrossEntropy())
        probe.rl.training.snapshot("back").result()
        stepped = probe.train(batch)
        probe.rl.training.forward_backward(batch, CrossEntropy()).result()
        restored = probe.rl.training.restore_snapshot("back").result()
        assert restored.version > stepped.version
        probe.same(probe.logprobs(batch), before, "logprobs after restore_snapshot")
        with refuses(ConflictError, "optim_step"):
            probe.rl.training.optim_step(AdamW(lr=0.0)).result()
        after = probe.gradient_norm(batch, CrossEntropy())
        probe.same_norm(after, norm, "gradient norm after restore_snapshot")
        probe.rl.training.drop_snapshot("back").result()

    def test_snapshots_have_names_of_their_own(self, probe: Probe) -> None:
        """A taken name is a ConflictError; an unknown one is refused by name."""
        probe.needs("snapshot", "drop_snapshot", "restore_snapshot")
        probe.rl.training.snapshot("once").result()
        with refuses(ConflictError, "once"):
            probe.rl.training.snapshot("once").result()
        with refuses(InvalidRequestError, "onse", "once"):
            probe.rl.training.restore_snapshot("onse").result()
        with refuses(InvalidRequestError, "current"):
            probe.rl.training.snapshot("current").result()
        probe.rl.training.drop_snapshot("once").result()
        with refuses(InvalidRequestError, "once"):
            probe.rl.training.drop_snapshot("once").result()

    def test_the_reference_is_the_base_until_it_is_set(self, probe: Probe) -> None:
        """Training moves the current weights and leaves the reference."""
        probe.needs_training()
        probe.needs("reset", policy="reference")
        batch = probe.batch()
        base = probe.logprobs(batch)
        probe.train(batch)
        probe.same(probe.logprobs(batch, "reference"), base, "logprobs of the reference")

    def test_the_reference_is_set_to_current_and_base(self, probe: Probe) -> None:
        """set_reference takes the current weights as they are, or the base's."""
        probe.needs_training()
        probe.needs("reset", "set_reference", policy="reference")
        batch = probe.batch()
        base = probe.logprobs(batch)
        probe.train(batch)
        current = probe.logprobs(batch)
        probe.rl.training.set_reference("current").result()
        probe.train(batch)
        probe.same(probe.logprobs(batch, "reference"), current, "the reference set to current")
        probe.rl.training.set_reference("base").result()
        probe.same(probe.logprobs(batch, "reference"), base, "the reference set to base")

    def test_the_reference_is_set_to_a_snapshot(self, probe: Probe) -> None:
        """set_reference takes a snapshot's weights and keeps them after it is dropped."""
        probe.needs_training()
        probe.needs("snapshot", "drop_snapshot", "set_reference", policy="reference")
        probe.needs(policy="snapshot")
        batch = probe.batch()
        probe.train(batch)
        kept = probe.logprobs(batch)
        probe.rl.training.snapshot("reference-source").result()
        probe.train(batch)
        probe.rl.training.set_reference("reference-source").result()
        probe.rl.training.drop_snapshot("reference-source").result()
        probe.same(probe.logprobs(batch, "reference"), kept, "the reference set to a snapshot")
        with refuses(InvalidRequestError, "reference-source"):
            probe.rl.training.set_reference("reference-source").result()

    def test_reset_is_a_new_run(self, probe: Probe) -> None:
        """reset gives the base weights back to trainer and sampler, with a fresh optimizer, no
        gradient, no snapshot and the base as reference, at a higher version."""
        probe.needs_training()
        probe.needs("reset")
        batch = probe.batch()
        base = probe.logprobs(batch)
        first = _step(probe)
        probe.rl.reset().result()
        probe.train(batch, CrossEntropy(scale=-1.0))
        if probe.offers("operation", "snapshot"):
            probe.rl.training.snapshot("forgotten").result()
        if probe.offers("operation", "set_reference"):
            probe.rl.training.set_reference("current").result()
        probe.rl.training.forward_backward(batch, CrossEntropy()).result()
        before = probe.rl.weights.version().result()
        probe.rl.reset().result()
        info = probe.rl.info().result()
        assert info.versions.trainer > before.trainer, "a reset gives a new version"
        assert info.versions.sampler == info.versions.trainer, "both halves are at the base"
        assert info.pristine, "after a reset a run is as new"
        probe.same(probe.logprobs(batch), base, "logprobs after a reset")
        with refuses(ConflictError, "optim_step"):
            probe.rl.training.optim_step(AdamW(lr=0.0)).result()
        if probe.offers("policy", "reference"):
            probe.same(probe.logprobs(batch, "reference"), base, "the reference after a reset")
        if probe.offers("policy", "snapshot"):
            with refuses(InvalidRequestError, "forgotten"):
                probe.rl.training.forward(batch, policy="forgotten").result()
        probe.same(_step(probe), first, "logprobs of the first step after a reset")


def _step(probe: Probe) -> Floats:
    probe.train(probe.batch())
    return probe.logprobs(probe.batch())
