"""Testing: what a generate gives back (imports the contract, base, checks, probe)."""

from __future__ import annotations

from typing import Any

import pytest

from ...errors import InvalidRequestError
from ...types import SamplingParams
from .base import Conformance
from .checks import check_ends, refuses, tokenizer_of, tokens_of, with_and_without_a_seed
from .probe import Probe

#: options that place the work and must not change what is drawn
ROUTING = {"session_id": "conformance", "priority": 3, "cache_salt": "salt"}


class Sampling(Conformance):
    """Counts, lengths, seeds and the order of samples."""

    def test_every_prompt_gets_n_samples_in_order(self, probe: Probe) -> None:
        """A generate answers with a group for each prompt, in order, of n samples that know their
        prompt and their place, with logprobs of their own length."""
        probe.needs("generate")
        groups = probe.draw(n=3)
        assert len(groups) == len(probe.prompts)
        for place, (group, prompt) in enumerate(zip(groups, probe.prompts)):
            assert group.prompt.tolist() == prompt
            assert (len(group), group.prompt_index) == (3, place)
            for index, sample in enumerate(group):
                assert (sample.prompt_index, sample.index) == (place, index)
                assert (sample.tokens < probe.model.vocab_size).all()
                asked = probe.offers("sampling_output", "logprobs")
                assert (sample.logprobs is not None) == asked
                assert sample.logprobs is None or (sample.logprobs <= probe.tolerance).all()

    def test_limits_are_those_of_each_generate(self, probe: Probe) -> None:
        """Counts and lengths are those of each generate, with others in flight."""
        probe.needs("generate")
        sizes = [(1, 9), (3, 2), (2, 5)]
        flying = [
            probe.rl.sampling.generate(probe.prompts, probe.params(n=n, max_tokens=longest))
            for n, longest in sizes
        ]
        for (n, longest), operation in zip(sizes, flying):
            groups = operation.result()
            assert [len(group) for group in groups] == [n] * 3
            check_ends(groups, probe.ends(), longest)

    def test_samples_of_a_prompt_differ(self, probe: Probe) -> None:
        """The n samples of a prompt are drawn independently."""
        probe.needs("generate")
        for given in with_and_without_a_seed(probe):
            for group in probe.draw(n=8, max_tokens=12, **given):
                different = {tuple(sample.tokens.tolist()) for sample in group}
                assert len(different) > 1, f"8 samples of {group} are all {different.pop()}"

    def test_samples_of_a_repeated_prompt_differ(self, probe: Probe) -> None:
        """Prompts are drawn for independently, equal ones and under one seed, too."""
        probe.needs("generate")
        prompt = probe.prompts[1]
        for given in with_and_without_a_seed(probe):
            one, other = probe.draw([prompt, prompt], n=4, max_tokens=12, **given)
            assert tokens_of([one]) != tokens_of([other]), "one prompt twice has the same samples"

    def test_a_seed_decides_the_samples(self, probe: Probe) -> None:
        """Equal seeds draw equal samples, whatever else is in flight; another seed draws others."""
        probe.needs("generate", sampling_option="seed")
        generate, params = probe.rl.sampling.generate, probe.params(n=3, max_tokens=8, seed=11)
        flying = [generate(probe.prompts, params) for _ in range(3)]
        flying.insert(1, generate(probe.prompts, probe.params(n=2, max_tokens=5)))
        first, _, second, third = (each.result() for each in flying)
        assert tokens_of(second) == tokens_of(third) == tokens_of(first), "one seed, other samples"
        assert tokens_of(generate(probe.prompts, params).result()) == tokens_of(first)
        other = generate(probe.prompts, probe.params(n=3, max_tokens=8, seed=12)).result()
        assert tokens_of(other) != tokens_of(first), "another seed drew the same samples"

    def test_generates_without_a_seed_draw_anew(self, probe: Probe) -> None:
        """Two generates without a seed draw different samples."""
        probe.needs("generate")
        one, other = (tokens_of(probe.draw(n=4, max_tokens=8)) for _ in range(2))
        assert one != other, "two generates without a seed drew the same samples"

    def test_generates_without_a_seed_repeat_after_a_reset(self, probe: Probe) -> None:
        """Seeds of generates without one follow from the run's seed and their count since the
        start or a reset."""
        probe.needs("generate", "reset")
        drawn = []
        for _ in range(2):
            probe.rl.reset().result()
            drawn.append([tokens_of(probe.draw(n=2)) for _ in range(2)])
        assert drawn[0] == drawn[1], "generates without a seed differ after a reset"

    def test_samples_come_as_they_finish(self, probe: Probe) -> None:
        """Iterating a generate gives every sample of its result once."""
        probe.needs("generate")
        operation = probe.rl.sampling.generate(probe.prompts, probe.params(n=4, max_tokens=12))
        came = {(sample.prompt_index, sample.index): sample for sample in operation}
        whole = [sample for group in operation.result() for sample in group]
        assert len(came) == len(whole) == 12
        for sample in whole:
            assert came[sample.prompt_index, sample.index] == sample

    def test_samples_say_which_weights_drew_them(self, probe: Probe) -> None:
        """Each sample carries the version of the weights that drew its first and last token."""
        probe.needs("generate")
        served = probe.rl.weights.version().result()
        for group in probe.draw(n=2):
            for sample in group:
                assert sample.first_version == sample.last_version == served.sampler

    @pytest.mark.parametrize("option", ROUTING)
    def test_routing_hints_change_no_sample(self, probe: Probe, option: str) -> None:
        """session_id, priority and cache_salt place the work and never change what is drawn."""
        probe.needs("generate", sampling_option=option)
        plain = [sample.tokens.tolist() for sample in probe.greedy()]
        given: dict[str, Any] = {option: ROUTING[option]}
        assert [sample.tokens.tolist() for sample in probe.greedy(**given)] == plain

    def test_a_finished_session_changes_no_sample(self, probe: Probe) -> None:
        """finish_session lets a session's cache go, and is no error for one that never was."""
        probe.needs("generate", "finish_session")
        session: dict[str, Any] = {}
        if probe.offers("sampling_option", "session_id"):
            session["session_id"] = "conformance"
        before = [sample.tokens.tolist() for sample in probe.greedy(**session)]
        probe.rl.sampling.finish_session("conformance").result()
        probe.rl.sampling.finish_session("never-was").result()
        assert [sample.tokens.tolist() for sample in probe.greedy(**session)] == before

    def test_the_prefix_cache_can_be_dropped(self, probe: Probe) -> None:
        """reset_prefix_cache changes no sample."""
        probe.needs("generate", "reset_prefix_cache")
        before = [sample.tokens.tolist() for sample in probe.greedy()]
        probe.rl.sampling.reset_prefix_cache().result()
        assert [sample.tokens.tolist() for sample in probe.greedy()] == before

    def test_the_tokenizer_speaks_the_models_ids(self, probe: Probe) -> None:
        """The tokenizer encodes text to ids of the model and decodes them."""
        probe.needs("tokenizer")
        tokenizer = tokenizer_of(probe)
        ids = list(tokenizer.encode("1 + 2 = 3"))
        assert ids, "a text of ids was encoded to none"
        assert all(0 <= token < probe.model.vocab_size for token in ids), f"ids {ids}"
        assert isinstance(tokenizer.decode(ids), str)
        with refuses(InvalidRequestError, "token ids"):
            probe.rl.sampling.generate("text", SamplingParams(max_tokens=1))
