"""Testing: the logprobs that come with samples (imports numpy, the contract, losses, base, checks,
probe)."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from ...losses import CrossEntropy
from ...types import Batch, Group
from .base import Conformance
from .checks import places, tokens_of, unrolled
from .probe import Floats, Probe

TEMPERATURES = ((0.7,), (1.0,), (1.3,), (1.3, 0.7))
TRUNCATIONS = {"top_p": 0.6, "top_k": 3, "min_p": 0.4, "min_tokens": 1}


class SampledLogprobs(Conformance):
    """The sampler's numbers are the trainer's: of the full vocabulary, at the temperature."""

    @pytest.mark.parametrize(
        "temperatures", TEMPERATURES, ids=lambda each: " and ".join(map(str, each))
    )
    def test_sampler_and_trainer_agree_at_every_temperature(
        self, probe: Probe, temperatures: tuple[float, ...]
    ) -> None:
        """After a sync, a token's logprob is the same from the sampler, from a forward and in the
        value of forward_backward, at temperatures other than 1 as well, and with several of them
        in flight and in one batch."""
        probe.needs("generate", "forward", output="logprobs", sampling_output="logprobs")
        plain = temperatures == (1.0,)
        if not plain:
            probe.needs(sampling_option="temperature")
        if probe.offers("operation", "sync"):
            probe.sync()
        batch = _one_token_each(probe, temperatures)
        if not plain and _blind_to_temperature(probe, batch):
            probe.needs_training()  # a uniform policy is the same at all temperatures
            probe.needs("sync")
            probe.train(probe.singles(), lr=10 * probe.rate)
            probe.sync()
            batch = _one_token_each(probe, temperatures)
        sampled = _flat(batch, "sampling_logprobs")
        probe.same(sampled, probe.logprobs(batch), "logprobs of the sampler and of a forward")
        if probe.offers("operation", "zero_grad") and probe.offers("loss", "CrossEntropy"):
            value = probe.value(batch, CrossEntropy())
            probe.same(value, -sampled.mean(), "value of CrossEntropy at the temperature")

    @pytest.mark.parametrize("texts", ["short", "long"])
    def test_entry_t_of_a_sample_belongs_to_its_token_t(self, probe: Probe, texts: str) -> None:
        """The logprobs of a sample are those of its tokens, each given the prompt and the tokens
        before it, in long samples and after long prompts as in short ones."""
        probe.needs("generate", "forward", output="logprobs", sampling_output="logprobs")
        if probe.offers("operation", "sync"):
            probe.sync()
        if texts == "short":
            batch = Batch.from_groups(probe.draw(n=2))
            chosen = list(range(len(batch.responses.values)))
        else:
            long = probe.long_batch()
            prompts = [ids.tolist() for ids in long.prompts]
            batch = Batch.from_groups(probe.draw(prompts, max_tokens=max(long.responses.lengths)))
            chosen = places(batch)
        alone = probe.logprobs(unrolled(batch).select(chosen))
        sampled = _flat(batch, "sampling_logprobs")
        probe.same(sampled[chosen], alone, f"logprobs along samples of {texts} texts")

    def test_a_temperature_of_zero_takes_the_likeliest(self, probe: Probe) -> None:
        """At temperature 0 each token is the likeliest one, and its logprob counts at 1."""
        probe.needs("forward", output="logprobs", sampling_output="logprobs")
        probe.needs("generate", sampling_option="temperature")
        groups = probe.draw(temperature=0.0, max_tokens=1)
        batch = Batch.from_groups(groups)
        assert batch.temperature.tolist() == [1.0] * len(batch)
        sampled = _flat(batch, "sampling_logprobs")
        probe.same(sampled, probe.logprobs(batch), "logprobs at temperature 0, counted at 1")
        size = min(probe.model.vocab_size, 1024)
        for row, prompt in enumerate(probe.prompts):
            others = Batch(
                prompts=[prompt],
                prompt_index=np.zeros(size, np.int32),
                responses=[[token] for token in range(size)],
                temperature=1.0,
            )
            best = probe.logprobs(others).max()
            assert sampled[row] >= best - probe.tolerance, (
                f"after prompt {row}, token {batch.responses[row].tolist()} of logprob "
                f"{sampled[row]:.6g} was taken, and there is one of {best:.6g}"
            )

    @pytest.mark.parametrize("option", TRUNCATIONS)
    def test_truncation_leaves_logprobs_those_of_the_full_vocabulary(
        self, probe: Probe, option: str
    ) -> None:
        """With top_p, top_k, min_p or min_tokens `logprobs` stay those of the full vocabulary;
        those of the truncated distribution are `drawn_logprobs`, or absent."""
        probe.needs("generate", "forward", output="logprobs", sampling_output="logprobs")
        probe.needs(sampling_option=option)
        both = {"logprobs", "drawn_logprobs"} & probe.capabilities.sampling_outputs
        given: dict[str, Any] = {option: TRUNCATIONS[option], "outputs": both}
        if option == "min_tokens":  # it leaves out what ends a response
            probe.needs(sampling_option="stop_token_ids")
            given["stop_token_ids"] = _many_ids(probe)
        groups = probe.draw(n=6, max_tokens=1, **given)
        batch = Batch.from_groups(groups)
        sampled = _flat(batch, "sampling_logprobs")
        probe.same(sampled, probe.logprobs(batch), f"logprobs with {option}")
        if "drawn_logprobs" in both:
            _check_drawn(probe, groups, option)

    def test_without_truncation_both_logprobs_are_the_same(self, probe: Probe) -> None:
        """drawn_logprobs are logprobs where nothing is left out of the draw."""
        probe.needs("generate", sampling_output="logprobs")
        probe.needs(sampling_output="drawn_logprobs")
        both = {"logprobs", "drawn_logprobs"}
        for group in probe.draw(n=4, max_tokens=1, outputs=both):
            for sample in group:
                probe.same(sample.drawn_logprobs, sample.logprobs, "drawn_logprobs")


def _many_ids(probe: Probe) -> tuple[int, ...]:
    """Ids of some probability together, whether the policy is near uniform or sure of itself."""
    size = probe.model.vocab_size
    if size <= 1024:
        return tuple(range(size // 2))
    likely = {tokens[0] for tokens in tokens_of(probe.draw(n=4, max_tokens=1))}
    return tuple({*range(512), *likely})


def _one_token_each(probe: Probe, temperatures: tuple[float, ...]) -> Batch:
    flying = []
    for temperature in temperatures:
        given: dict[str, Any] = {} if temperature == 1 else {"temperature": temperature}
        params = probe.params(n=4, max_tokens=1, **given)
        flying.append(probe.rl.sampling.generate(probe.prompts, params))
    return Batch.concat([Batch.from_groups(each.result()) for each in flying])


def _blind_to_temperature(probe: Probe, batch: Batch) -> bool:
    colder = batch.replace(temperature=batch.temperature / 2)
    far = np.abs(probe.logprobs(batch) - probe.logprobs(colder)).max()
    return bool(far <= 10 * probe.tolerance)


def _flat(batch: Batch, name: str) -> Floats:
    rows = getattr(batch, name)
    assert rows is not None, f"the samples have no {name}"
    values: Floats = rows.values.astype(np.float64)
    return values


def _check_drawn(probe: Probe, groups: tuple[Group, ...], option: str) -> None:
    cut = False
    for group in groups:
        pairs = [
            (float(sample.drawn_logprobs[0]), float(sample.logprobs[0]), int(sample.tokens[0]))
            for sample in group
            if sample.drawn_logprobs is not None and sample.logprobs is not None
        ]
        shifts = [drawn - full for drawn, full, _ in pairs]
        cut |= min(shifts) > 10 * probe.tolerance
        for one, other in itertools.pairwise(shifts):
            probe.same(one, other, f"drawn_logprobs - logprobs of one prompt with {option}")
        assert min(shifts) >= -probe.tolerance, f"{option} made a token less likely"
        by_token = {token: drawn for drawn, _, token in pairs}
        kept = float(np.exp(list(by_token.values())).sum())
        assert kept <= 1 + probe.tolerance, f"drawn_logprobs sum to {kept:g} with {option}"
    if option != "min_p":  # a policy near uniform loses nothing by it
        assert cut, f"drawn_logprobs are those of the full vocabulary with {option}"
