"""Testing: aborts, pauses, and what they leave alone (imports the contract, base, checks,
probe)."""

from __future__ import annotations

import time

import pytest

from ...errors import ConflictError
from ...requests import Pause, Resume
from ...types import Group
from .base import Conformance
from .checks import refuses
from .probe import Probe

#: seconds that whatever must come, comes in
PATIENCE = 120.0


class Control(Conformance):
    """What acts on generates that run."""

    def test_an_abort_is_told_apart_from_length_and_stop(self, probe: Probe) -> None:
        """abort ends a running generate; samples that were not finished say "abort" and keep the
        tokens they have."""
        probe.needs("generate")
        for operation, params in probe.long_generates():
            probe.rl.sampling.abort(operation).result()
            groups = operation.result(PATIENCE)
            short = probe.cut_short(groups, params)
            for sample in short:
                assert sample.finish_reason == "abort", (
                    f"{sample} has neither {params.max_tokens} tokens nor an end, and says "
                    f"{sample.finish_reason!r}"
                )
                assert sample.logprobs is None or len(sample.logprobs) == len(sample)
            whole = [sample for group in groups for sample in group if sample not in short]
            assert all(sample.finish_reason != "abort" for sample in whole)
            if short:
                return

    def test_an_abort_means_those_it_names(self, probe: Probe) -> None:
        """abort ends the generates that it names, also while generation is paused, and no others;
        without names it means all."""
        probe.needs("generate", "pause", "resume")
        generate, params = probe.rl.sampling.generate, probe.params(max_tokens=8)
        probe.rl.sampling.pause().result()
        named, other, last = (generate(probe.prompts, params) for _ in range(3))
        probe.rl.sampling.abort(named).result()
        assert _tokens(named.result(PATIENCE)) < 3 * 8, "the named one ended early"
        assert not other.done(), "another generate ended with it"
        probe.rl.sampling.abort().result()
        assert _tokens(other.result(PATIENCE)) + _tokens(last.result(PATIENCE)) < 2 * 3 * 8
        probe.rl.sampling.resume().result()
        samples = [sample for group in probe.draw() for sample in group]
        assert all(sample.finish_reason != "abort" for sample in samples), "a later one is whole"

    def test_a_pause_holds_generates_until_resume(self, probe: Probe) -> None:
        """While generation is paused nothing is drawn; resume lets all go on to their end."""
        probe.needs("generate", "pause", "resume")
        began = time.monotonic()
        probe.draw(max_tokens=2)
        usual = time.monotonic() - began
        probe.rl.sampling.pause().result()
        assert probe.rl.info().result().paused
        held = probe.rl.sampling.generate(probe.prompts, probe.params(max_tokens=2))
        try:
            held.result(max(0.1, 3 * usual))
        except TimeoutError:
            pass  # as it must be
        else:
            raise AssertionError("a generate ended while generation was paused")
        probe.rl.sampling.resume().result()
        assert not probe.rl.info().result().paused
        assert [len(group) for group in held.result(PATIENCE)] == [1, 1, 1]

    def test_training_goes_on_while_generation_is_paused(self, probe: Probe) -> None:
        """A pause holds the sampler only."""
        probe.needs_training()
        probe.needs("pause", "resume")
        probe.rl.sampling.pause().result()
        probe.train(probe.batch())
        if probe.offers("operation", "sync") and probe.offers("in_flight", "wait"):
            with refuses(ConflictError, "paused"):
                probe.rl.weights.sync("wait").result()
        probe.rl.sampling.resume().result()

    def test_a_pause_that_arrives_late_is_ignored(self, probe: Probe) -> None:
        """A pause that a later resume has overtaken on the way does not stop generation."""
        probe.needs("generate", "pause", "resume")
        late, newer = probe.wire.reserve("pause"), probe.wire.reserve("resume")
        probe.wire.outcome(newer, Resume())
        probe.wire.outcome(late, Pause())
        assert not probe.rl.info().result().paused, "a pause older than the last resume held"
        probe.wire.acknowledge(newer)
        probe.wire.acknowledge(late)

    @pytest.mark.parametrize("half", ["training", "sampling"])
    def test_a_half_that_sleeps_is_woken_by_what_needs_it(self, probe: Probe, half: str) -> None:
        """sleep and wake keep weights and samples as they are, and an operation wakes what it
        needs."""
        probe.needs("sleep", "wake", "forward", "generate", output="logprobs")
        batch = probe.batch()
        logprobs, samples = probe.logprobs(batch), [each.tokens.tolist() for each in probe.greedy()]
        for wake in (False, True):
            probe.rl.sleep(half).result()  # type: ignore[arg-type]
            if wake:
                probe.rl.wake(half).result()  # type: ignore[arg-type]
            probe.same(probe.logprobs(batch), logprobs, f"logprobs after sleep({half!r})")
            assert [each.tokens.tolist() for each in probe.greedy()] == samples


def _tokens(groups: tuple[Group, ...]) -> int:
    return sum(len(sample) for group in groups for sample in group)
