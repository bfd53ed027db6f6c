"""Testing: weights on their way to the sampler, and their versions (imports numpy, the contract,
base, probe)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ...types import Batch, SyncReceipt
from .base import Conformance
from .probe import Floats, Probe


class Delivery(Conformance):
    """Sync, its receipt, staleness, labels and versions."""

    def test_a_sync_delivers_the_weights(self, probe: Probe) -> None:
        """After a step and a sync the sampler's logprobs are the trainer's new ones."""
        probe.needs_training()
        probe.needs("generate", "sync", sampling_output="logprobs")
        batch = probe.singles()
        before = probe.logprobs(batch)
        probe.train(batch)
        probe.sync()
        probe.differ(probe.logprobs(batch), before, "the trainer's logprobs after a step")
        drawn = Batch.from_groups(probe.draw(n=4, max_tokens=1))
        probe.same(_sampled(drawn), probe.logprobs(drawn), "logprobs of sampler and trainer")

    def test_the_sampler_keeps_its_weights_until_a_sync(self, probe: Probe) -> None:
        """A step changes the trainer's weights only; the sampler serves the old ones, under their
        version, until a sync."""
        probe.needs_training()
        probe.needs("generate", "sync", sampling_output="logprobs")
        before = probe.greedy(max_tokens=1)
        probe.train(
            Batch(
                prompts=probe.prompts,
                prompt_index=[0, 1, 2],
                responses=[sample.tokens for sample in before],
                temperature=1.0,
            )
        )
        after = probe.greedy(max_tokens=1)
        probe.same(_entries(after), _entries(before), "the sampler's logprobs before a sync")
        versions = probe.rl.weights.version().result()
        assert {sample.last_version for sample in after} == {versions.sampler}
        assert versions.sampler is not None
        assert versions.sampler < versions.trainer
        assert probe.sync() == versions.trainer
        assert {sample.first_version for sample in probe.greedy()} == {versions.trainer}

    def test_a_receipt_proves_the_delivery(self, probe: Probe) -> None:
        """A receipt says version, tensors, bytes and seconds, and a fingerprint of what was sent
        that is that of what the sampler holds."""
        probe.needs("sync")
        receipt = probe.rl.weights.sync().result()
        versions = probe.rl.weights.version().result()
        assert receipt.version == versions.trainer == versions.sampler
        assert receipt.tensors > 0, "a receipt of no tensors"
        assert receipt.bytes > 0, "a receipt of no bytes"
        assert receipt.source_fingerprint, "a receipt without a fingerprint"
        assert receipt.sampler_fingerprint == receipt.source_fingerprint
        again = probe.rl.weights.sync().result()
        assert _what(again) == _what(receipt), "the same model gave another receipt"

    @pytest.mark.parametrize("label", [7, "epoch-1"])
    def test_a_label_travels_onto_the_samples(self, probe: Probe, label: int | str) -> None:
        """A sync's label is on its receipt, in the version and on every sample that it serves."""
        probe.needs("generate", "sync")
        receipt = probe.rl.weights.sync(label=label).result()
        assert receipt.label == label
        assert probe.rl.weights.version().result().label == label
        labels = {(each.first_label, each.label) for group in probe.draw() for each in group}
        assert labels == {(label, label)}, f"labels {labels}"

    def test_versions_rise_with_every_change_and_never_repeat(self, probe: Probe) -> None:
        """Every change of the weights takes a version that none had before: steps, restored
        snapshots, loads and resets; forward and sync report it."""
        probe.needs_training()
        changes = _changes(probe)
        seen = [_version(probe)]
        for what, change in changes:
            change()
            version = _version(probe)
            assert version > seen[-1], f"version {version} after {what}, {seen[-1]} before"
            seen.append(version)

    def test_keep_goes_on_with_running_generates(self, probe: Probe) -> None:
        """sync("keep") does not wait for a running generate, which goes on with the new weights."""
        probe.needs_training()
        probe.needs("generate", "sync", in_flight="keep")
        old = probe.sync()
        running = probe.rl.sampling.generate(probe.prompts, probe.params(n=4, max_tokens=24))
        probe.train(probe.batch())
        new = probe.sync()
        samples = [sample for group in running.result() for sample in group]
        for sample in samples:
            assert old <= sample.first_version <= sample.last_version <= new, f"{sample}"
            assert sample.finish_reason != "abort", f"{sample} was to go on"

    def test_wait_lets_running_generates_finish(self, probe: Probe) -> None:
        """sync("wait") ends after the generates that ran, each drawn from one version alone."""
        probe.needs_training()
        probe.needs("generate", "sync", in_flight="wait")
        old = probe.sync()
        running = probe.rl.sampling.generate(probe.prompts, probe.params(n=4, max_tokens=24))
        probe.train(probe.batch())
        receipt = probe.rl.weights.sync("wait").result()
        samples = [sample for group in running.result() for sample in group]
        for sample in samples:
            assert sample.first_version == sample.last_version, f"{sample} mixes weights"
            assert sample.first_version in (old, receipt.version)
            assert sample.finish_reason != "abort", f"{sample} was to finish"

    def test_abort_ends_running_generates(self, probe: Probe) -> None:
        """sync("abort") ends the generates that run, with the weights that they began with."""
        probe.needs_training()
        probe.needs("generate", "sync", in_flight="abort")
        old = probe.sync()
        for operation, params in probe.long_generates():
            probe.rl.weights.sync("abort").result()
            groups = operation.result()
            for group in groups:
                assert all(sample.last_version == old for sample in group)
            if probe.cut_short(groups, params):
                return


def _sampled(batch: Batch) -> Floats:
    assert batch.sampling_logprobs is not None, "the samples have no logprobs"
    return batch.sampling_logprobs.values.astype(np.float64)


def _entries(samples: Any) -> Floats:
    return np.concatenate([sample.logprobs for sample in samples]).astype(np.float64)


def _what(receipt: SyncReceipt) -> tuple[object, ...]:
    return receipt.tensors, receipt.bytes, receipt.source_fingerprint


def _changes(probe: Probe) -> list[tuple[str, Callable[[], Any]]]:
    training, batch = probe.rl.training, probe.batch()
    changes: list[tuple[str, Callable[[], Any]]] = [("a step", lambda: probe.train(batch))]
    if probe.offers("operation", "snapshot") and probe.offers("operation", "restore_snapshot"):
        training.snapshot("version").result()
        restore = lambda: training.restore_snapshot("version").result()  # noqa: E731
        changes += [("restore_snapshot", restore), ("a step", lambda: probe.train(batch))]
    if probe.offers("operation", "load") and probe.info.checkpoint_dir:
        name = probe.name("versions")
        training.save(name).result()
        changes += [("a load", lambda: training.load(name).result())] * 2
    if probe.offers("operation", "reset"):
        changes.append(("a reset", lambda: probe.rl.reset().result()))
    return [*changes, ("a step", lambda: probe.train(batch))]


def _version(probe: Probe) -> int:
    trainer = probe.rl.weights.version().result().trainer
    assert probe.rl.training.forward(probe.batch()).result().version == trainer
    if probe.offers("operation", "sync"):
        assert probe.sync() == trainer
    return trainer
