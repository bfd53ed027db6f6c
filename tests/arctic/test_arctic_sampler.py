"""What a sampling engine draws: logprobs against transformers, truncation against the mock's,
seeds, ends, refusals. Tiny models in a real vLLM."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sampler_engine import BOTH, CONTEXT, END, PROMPT, Running, logprobs, table, tied_qwen3

from backends.arctic.sampling.seeds import draw_seeds, sample_key
from backends.mock.sampling_math import truncated
from remote_rl.errors import InvalidRequestError
from remote_rl.types import Sample

LONG = tuple(range(3, 203))  # three pieces of 64 tokens, and a rest


@pytest.fixture(scope="module")
def running() -> Running:
    return tied_qwen3()


def _ids(samples: list[Sample]) -> list[list[int]]:
    return [sample.tokens.tolist() for sample in samples]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3, 1e-4, 1e4])
@pytest.mark.parametrize("prompt", [PROMPT, LONG], ids=["short", "long"])
def test_logprobs_are_those_of_transformers(
    running: Running, temperature: float, prompt: tuple[int, ...]
) -> None:
    for sample in running.draw(prompt, count=3, temperature=temperature):
        expected = logprobs(running.model, prompt, sample, temperature)
        # the logits' own error is as much larger as they are
        allowed = 1e-4 / min(temperature, 1)
        np.testing.assert_allclose(sample.logprobs, expected, atol=allowed)
        np.testing.assert_allclose(sample.drawn_logprobs, sample.logprobs, atol=1e-5 / temperature)


def test_temperatures_in_one_batch_stay_apart(running: Running) -> None:
    temperatures = (0.0, 0.7, 1.0, 1.3)
    flying = [running.begin(temperature=each, top_k=40) for each in temperatures]
    for temperature, future in zip(temperatures, flying):
        [sample] = future.result()
        expected = logprobs(running.model, PROMPT, sample, temperature or 1)
        np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)


def test_a_temperature_of_zero_takes_the_likeliest(running: Running) -> None:
    [sample] = running.draw(temperature=0.0)
    rows = table(running.model, PROMPT, sample)
    assert sample.tokens.tolist() == rows.argmax(axis=1).tolist()
    np.testing.assert_allclose(sample.logprobs, rows.max(axis=1), atol=1e-4)
    assert sample.drawn_logprobs is not None
    assert not sample.drawn_logprobs.any(), "greedy leaves no choice"


@pytest.mark.parametrize(
    "cut",
    [
        {"top_p": 0.6},
        {"top_k": 3},
        {"min_p": 0.3},
        {"top_p": 0.8, "top_k": 20, "min_p": 0.05},
        {"top_k": 1},
        {"top_k": 100_000},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_truncation_leaves_both_logprobs(
    running: Running, cut: dict[str, Any], temperature: float
) -> None:
    given = {"top_p": 1.0, "top_k": None, "min_p": 0.0, **cut}
    for sample in running.draw(count=4, temperature=temperature, **cut):
        rows = table(running.model, PROMPT, sample, temperature)
        own = np.arange(len(rows)), sample.tokens
        np.testing.assert_allclose(sample.logprobs, rows[own], atol=1e-4)
        expected = truncated(rows, **given)[own]
        assert np.isfinite(expected).all(), "a token was drawn that should be left out"
        np.testing.assert_allclose(sample.drawn_logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("cut", [{}, {"top_k": 5}, {"min_p": 0.3}, {"top_p": 0.6}], ids=str)
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_min_tokens_leave_ends_out_of_what_is_drawn_from(
    running: Running, cut: dict[str, Any], temperature: float
) -> None:
    [free] = running.draw(temperature=temperature)
    given = {"top_p": 1.0, "top_k": None, "min_p": 0.0, **cut}
    # likely ones, so that leaving them out is seen, and what begins at one id ends the sample
    ends = sorted({END, *range(3, 100), *free.tokens.tolist()})
    stops = tuple(ends)
    # others in the same batch are drawn from all ids, or are past their min_tokens
    beside = [
        running.begin(temperature=temperature, count=2),
        running.begin(temperature=temperature, min_tokens=1, count=2),
    ]
    samples = running.draw(
        count=6, temperature=temperature, min_tokens=5, stop_token_ids=stops, **cut
    )
    for sample in samples:
        rows = table(running.model, PROMPT, sample, temperature)
        own = np.arange(len(rows)), sample.tokens
        np.testing.assert_allclose(sample.logprobs, rows[own], atol=1e-4)
        rows[:5, ends] = -np.inf
        expected = truncated(rows - np.logaddexp.reduce(rows, axis=1, keepdims=True), **given)
        assert np.isfinite(expected[own]).all(), "a token was drawn that should be left out"
        np.testing.assert_allclose(sample.drawn_logprobs, expected[own], atol=1e-4)
        assert not set(ends) & set(sample.tokens[:5].tolist())
    assert "stop" in {sample.finish_reason for sample in samples}, "none ended after min_tokens"
    for sample in beside[0].result():
        np.testing.assert_allclose(sample.drawn_logprobs, sample.logprobs, atol=1e-5)
    for sample in beside[1].result():
        np.testing.assert_allclose(sample.drawn_logprobs[1:], sample.logprobs[1:], atol=1e-5)
        assert sample.drawn_logprobs[0] > sample.logprobs[0], "without the end of sequence"


def test_min_tokens_hold_for_greedy_samples(running: Running) -> None:
    [free] = running.draw(temperature=0.0, max_tokens=8)
    chosen = free.tokens.tolist()[0]
    [late] = running.draw(temperature=0.0, max_tokens=8, min_tokens=3, stop_token_ids=(chosen,))
    rows = table(running.model, PROMPT, late)
    own = np.arange(len(rows)), late.tokens
    np.testing.assert_allclose(late.logprobs, rows[own], atol=1e-4)
    rows[:3, [chosen, END]] = -np.inf
    assert late.tokens.tolist() == rows.argmax(axis=1).tolist()
    assert late.drawn_logprobs is not None
    assert not late.drawn_logprobs.any()


def test_tokens_come_as_often_as_they_should(running: Running) -> None:
    count = 3000
    samples = running.draw(count=count, max_tokens=1, temperature=1.3, top_k=12)
    expected = np.exp(
        truncated(table(running.model, PROMPT, samples[0], 1.3), top_p=1.0, top_k=12, min_p=0.0)
    )[0]
    kept = expected > 0
    counts = np.bincount([sample.tokens[0] for sample in samples], minlength=len(expected))
    assert not counts[~kept].any()
    wanted = expected[kept] * count
    assert ((counts[kept] - wanted) ** 2 / wanted).sum() < 31.3, "chi-square of 11 degrees at 0.001"


@pytest.mark.parametrize("prompt", [PROMPT, LONG], ids=["short", "long"])
def test_a_seed_decides_whatever_else_is_in_flight(
    running: Running, prompt: tuple[int, ...]
) -> None:
    alone = running.draw(prompt, count=4)
    others = [
        running.begin(LONG[:150], count=9, seed=5, max_tokens=3),
        running.begin(count=12, seed=6, temperature=0.7),
    ]
    assert _ids(running.draw(prompt, count=4)) == _ids(alone)
    assert _ids(running.draw(prompt, count=2)) == _ids(alone[:2]), "n does not matter"
    for other in others:
        other.result()
    assert len({tuple(each) for each in _ids(alone)}) == 4
    assert _ids(running.draw(prompt, count=4, seed=12)) != _ids(alone)
    assert _ids(running.draw(prompt, count=4, prompt_index=1)) != _ids(alone)


def test_a_draw_has_its_own_seed() -> None:
    keys = {sample_key(*each) for each in np.ndindex(5, 5, 5)}
    assert len(keys) == 125
    assert sample_key(2**63 - 1, 0, 0) < 2**63
    several = np.array(sorted(keys)[:20], np.int64)
    seeds = {int(each) for step in range(20) for each in draw_seeds(several, np.full(20, step))}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_ends_are_kept_and_told_from_lengths(running: Running) -> None:
    samples = running.draw(count=24, max_tokens=60)
    for sample in samples:
        ids = sample.tokens.tolist()
        assert END not in ids[:-1]
        assert sample.finish_reason == ("stop" if ids[-1] == END else "length")
        assert sample.finish_reason == "stop" or len(ids) == 60
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}


def test_a_stop_id_is_the_last_token(running: Running) -> None:
    [free] = running.draw(temperature=0.0, max_tokens=8)
    chosen = free.tokens.tolist()[4]
    [stopped] = running.draw(temperature=0.0, max_tokens=20, stop_token_ids=(chosen,))
    place = free.tokens.tolist().index(chosen)
    assert stopped.tokens.tolist() == free.tokens.tolist()[: place + 1]
    assert stopped.finish_reason == "stop"


def test_a_stop_string_is_left_out(running: Running) -> None:
    assert running.engine.offers_stop_strings()
    tokens = running.engine._table
    assert tokens is not None
    for seed in range(20):
        [free] = running.draw(seed=seed)
        text = [tokens[token] for token in free.tokens.tolist()]
        for place in range(1, 10):
            match = b"".join(text[place : place + 2])
            if not (text[place] and text[place + 1] and match.isascii()):
                continue
            if b"".join(text).find(match) != len(b"".join(text[:place])):
                continue
            [stopped] = running.draw(seed=seed, stop=("never there", match.decode()))
            assert stopped.tokens.tolist() == free.tokens.tolist()[:place]
            assert stopped.finish_reason == "stop"
            given: dict[str, Any] = {"seed": seed, "stop": match.decode()}
            [kept] = running.draw(include_stop=True, **given)
            assert kept.tokens.tolist() == free.tokens.tolist()[: place + 2]
            assert kept.finish_reason == "stop"
            [first] = running.draw(include_stop=True, max_tokens=place + 2, **given)
            assert first.finish_reason == "stop", "it is complete with the last token"
            assert stopped.logprobs is not None
            assert stopped.logprobs.tolist() == pytest.approx(
                free.logprobs[:place].tolist(), abs=1e-5
            )  # type: ignore[index]
            return
    pytest.fail("20 samples held no text")


def test_outputs_come_where_they_were_asked_for(running: Running) -> None:
    for outputs in (frozenset[str](), frozenset({"logprobs"}), frozenset({"drawn_logprobs"}), BOTH):
        [sample] = running.draw(outputs=outputs)
        assert (sample.logprobs is not None) == ("logprobs" in outputs)
        assert (sample.drawn_logprobs is not None) == ("drawn_logprobs" in outputs)


def test_routing_hints_change_nothing(running: Running) -> None:
    plain = _ids(running.draw(count=2))
    for hint in ({"priority": 3}, {"cache_salt": "salt"}, {"session_id": "one"}):
        assert _ids(running.draw(count=2, **hint)) == plain


@pytest.mark.parametrize(
    ("prompt", "given", "message"),
    [
        ((), {}, "prompt 0 is empty"),
        ((3, 300), {}, "token id 300, and the model has 300"),
        ((3, -1), {}, "token id -1"),
        (PROMPT, {"max_tokens": CONTEXT}, f"more than the context of {CONTEXT}"),
    ],
)
def test_bad_input_is_refused_before_anything_is_drawn(
    running: Running, prompt: tuple[int, ...], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        running.draw(prompt, **given)
    assert running.engine.in_flight == 0


def test_the_whole_context_can_be_used(running: Running) -> None:
    [sample] = running.draw(LONG, max_tokens=CONTEXT - len(LONG), temperature=0.0)
    assert sample.finish_reason == ("stop" if sample.tokens[-1] == END else "length")
