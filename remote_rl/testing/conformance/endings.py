"""Testing: where responses end (imports pytest, the contract, base, checks, probe)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ...types import Sample
from .base import Conformance
from .checks import check_ends, tokenizer_of, tokens_of, with_and_without_a_seed
from .probe import Probe


class Endings(Conformance):
    """Ends, stop ids and stop strings, and from which token on they count."""

    def test_samples_end_at_an_end_or_at_their_length(self, probe: Probe) -> None:
        """A sample ends with "stop" right at the first end id, which it keeps, or with "length" at
        max_tokens; nothing follows an end."""
        probe.needs("generate")
        check_ends(probe.draw(n=16, max_tokens=12), probe.ends(), 12)

    def test_a_stop_id_ends_a_sample_and_is_kept(self, probe: Probe) -> None:
        """A stop token id is the last token of its sample, which says "stop"."""
        probe.needs("generate", sampling_option="stop_token_ids")
        for prompt, free in zip(probe.prompts, probe.greedy(max_tokens=8)):
            tokens = free.tokens.tolist()
            chosen = tokens[-1]
            place = tokens.index(chosen)
            (stopped,) = probe.greedy([prompt], max_tokens=20, stop_token_ids=(chosen,))
            assert stopped.tokens.tolist() == tokens[: place + 1], (
                f"with stop id {chosen} the sample is {stopped.tokens.tolist()}, without {tokens}"
            )
            assert stopped.finish_reason == "stop", f"{stopped} ended at a stop id"

    def test_stop_ids_end_every_sample_of_every_prompt(self, probe: Probe) -> None:
        """With n samples of several prompts each ends at its own first stop id, and none because
        another did."""
        probe.needs("generate", sampling_option="stop_token_ids")
        given = with_and_without_a_seed(probe)[-1]  # a seed leads to the same tokens again
        free = probe.draw(n=4, max_tokens=12, **given)
        ids = tuple({tokens[len(tokens) // 2] for tokens in tokens_of(free)[::2] if tokens})
        groups = probe.draw(n=4, max_tokens=12, stop_token_ids=ids, **given)
        if not set(ids) & {token for tokens in tokens_of(groups) for token in tokens}:
            pytest.skip("12 samples came across none of the stop ids")
        check_ends(groups, probe.ends(*ids), 12)

    def test_no_end_comes_before_min_tokens(self, probe: Probe) -> None:
        """No end id and no stop id is drawn before min_tokens tokens are there, in none of the n
        samples of several prompts."""
        probe.needs("generate", sampling_option="min_tokens")
        probe.needs(sampling_option="stop_token_ids")
        given = with_and_without_a_seed(probe)[-1]  # a seed leads to the same tokens again
        free = probe.draw(n=4, max_tokens=1, **given)
        ids = tuple({tokens[0] for tokens in tokens_of(free)})
        groups = probe.draw(n=4, max_tokens=12, min_tokens=3, stop_token_ids=ids, **given)
        for tokens in tokens_of(groups):
            early = probe.ends(*ids) & set(tokens[:3])
            assert not early, f"{tokens} has the end id {min(early)} among its first 3 tokens"

    def test_an_end_comes_right_after_min_tokens(self, probe: Probe) -> None:
        """With min_tokens=t a stop id may be token t, counted from 0, and with t + 1 it may not;
        what else is drawn stays the same."""
        probe.needs("generate", sampling_option="min_tokens")
        probe.needs(sampling_option="stop_token_ids")
        for prompt, free in zip(probe.prompts, probe.greedy(max_tokens=8)):
            tokens = free.tokens.tolist()
            place = max(tokens.index(token) for token in tokens)
            stops: dict[str, Any] = {"stop_token_ids": (tokens[place],)}
            (allowed,) = probe.greedy([prompt], max_tokens=place + 3, min_tokens=place, **stops)
            assert allowed.tokens.tolist() == tokens[: place + 1], (
                f"with min_tokens={place} the sample is {allowed.tokens.tolist()}, without {tokens}"
            )
            (later,) = probe.greedy([prompt], max_tokens=place + 1, min_tokens=place + 1, **stops)
            assert later.tokens.tolist()[:place] == tokens[:place], (
                f"with min_tokens={place + 1} the sample is {later.tokens.tolist()}, without "
                f"{tokens}"
            )
            assert int(later.tokens[-1]) != tokens[place], f"{later} ends before min_tokens"
            assert later.finish_reason == "length", f"{later} is of max_tokens"

    def test_stop_strings_end_every_sample_of_every_prompt(self, probe: Probe) -> None:
        """With n samples of several prompts no sample holds a stop string, and each that is
        shorter than max_tokens says "stop"."""
        probe.needs("generate", "tokenizer", sampling_option="stop")
        tokenizer, given = tokenizer_of(probe), with_and_without_a_seed(probe)[-1]
        prompts = [[token] for token in probe.ids(4, seed=5)]
        free = probe.draw(prompts, n=4, max_tokens=12, **given)
        found = [_stop_string(tokenizer, tokens) for tokens in tokens_of(free)]
        strings = tuple({text for each in found[::3] if each is not None for *_, text in [each]})
        if not strings:
            pytest.skip("the samples hold no token that reads as text of its own")
        for group in probe.draw(prompts, n=4, max_tokens=12, stop=strings, **given):
            for sample in group:
                text = tokenizer.decode(sample.tokens.tolist(), skip_special_tokens=True)
                held = [each for each in strings if each in text]
                assert not held, f"{sample} holds the stop string {held[0]!r}: {text!r}"
                whole = len(sample) == 12 and int(sample.tokens[-1]) not in probe.ends()
                wanted = "length" if whole else "stop"
                assert sample.finish_reason == wanted, f"{sample}: should say {wanted!r}"

    def test_a_stop_string_ends_a_sample_and_is_left_out(self, probe: Probe) -> None:
        """A stop string ends a sample with "stop"; tokens from the first one that holds part of
        the match on are left out."""
        probe.needs("generate", "tokenizer", sampling_option="stop")
        for prompt, free, start, _, text in _stopping(probe):
            (stopped,) = probe.greedy([prompt], max_tokens=12, stop=(text,))
            _check_stopped(stopped, free, start, text)

    def test_a_stop_string_stays_where_it_is_included(self, probe: Probe) -> None:
        """With include_stop a response ends with the token that completes the stop string."""
        probe.needs("generate", "tokenizer", sampling_option="stop")
        probe.needs(sampling_option="include_stop")
        for prompt, free, _, end, text in _stopping(probe):
            (stopped,) = probe.greedy([prompt], max_tokens=12, stop=(text,), include_stop=True)
            _check_stopped(stopped, free, end, text)

    def test_stop_strings_count_after_min_tokens(self, probe: Probe) -> None:
        """A stop string that is complete within min_tokens tokens does not count, one that the
        next token completes does."""
        probe.needs("generate", "tokenizer", sampling_option="stop")
        probe.needs(sampling_option="min_tokens")
        for prompt, free, _, end, text in _stopping(probe):
            given: dict[str, Any] = {"max_tokens": end, "stop": (text,)}
            (stopped,) = probe.greedy([prompt], min_tokens=end - 1, **given)
            assert stopped.finish_reason == "stop", (
                f"{stopped}, with min_tokens={end - 1}, goes on after the stop string {text!r}"
            )
            (whole,) = probe.greedy([prompt], min_tokens=end, **given)
            assert whole.tokens.tolist() == free.tokens[:end].tolist(), (
                f"with stop {text!r} and min_tokens={end} the sample is {whole.tokens.tolist()}, "
                f"without them {free.tokens.tolist()}"
            )
            assert whole.finish_reason == "length", f"{whole} is of max_tokens"


def _stopping(probe: Probe) -> Iterator[tuple[list[int], Sample, int, int, str]]:
    """Prompt and greedy sample, of twelve tokens at most, and what `_stop_string` finds in it;
    skips where it finds nothing in any."""
    tokenizer, tried = tokenizer_of(probe), 0
    prompts = [[token] for token in probe.ids(16, seed=5)]
    for prompt, free in zip(prompts, probe.greedy(prompts, max_tokens=12)):
        found = _stop_string(tokenizer, free.tokens.tolist())
        if found is not None:
            tried += 1
            yield prompt, free, *found
    if not tried:
        pytest.skip("16 greedy samples hold no token that reads as text of its own")


def _check_stopped(stopped: Sample, free: Sample, length: int, text: str) -> None:
    """Fails unless it is `free`'s first tokens, ended by the stop string."""
    assert stopped.tokens.tolist() == free.tokens[:length].tolist(), (
        f"with stop {text!r} the sample is {stopped.tokens.tolist()}; without it "
        f"{free.tokens.tolist()}, of which the first {length} should be left"
    )
    assert stopped.finish_reason == "stop", f"{stopped} ended at a stop string"
    assert stopped.logprobs is None or len(stopped.logprobs) == length


def _stop_string(tokenizer: Any, tokens: list[int]) -> tuple[int, int, str] | None:
    """A string that the greedy tokens hold, where its tokens start and where they end: of two
    tokens where they read as text, else of one; None where none does."""

    def text_of(some: list[int]) -> str:
        text: str = tokenizer.decode(some, skip_special_tokens=True)
        return text

    for width in (2, 1):
        for place in range(1, len(tokens) - width):
            match = tokens[place : place + width]
            before, text = text_of(tokens[:place]), text_of(match)
            together = text_of(tokens[: place + width])
            clean = text.strip() and "\ufffd" not in together and together == before + text
            whole = all(map(text_of, ([each] for each in match)))
            if clean and whole and together.find(text) == len(before):
                return place, place + width, text
    return None
