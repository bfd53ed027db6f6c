"""The mock's sampler: its distribution, truncation, ends of responses, and seeds."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest
from mock_workload import Run, running

from backends.mock.sampling_math import StopStrings, draw, truncated, uniform, without
from remote_rl.byte_tokenizer import ByteTokenizer
from remote_rl.types import Batch, Group

TOKENS = ByteTokenizer()
BYTES = {"vocab_size": 259, "eos_token_ids": ()}


# -- distribution ---------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_logprobs_are_the_trainers_bits_and_frequencies_follow_them(temperature: float) -> None:
    @running
    async def check() -> None:
        run = await Run(eos_token_ids=()).start()
        samples = await run.generate([[1, 2]], n=6000, max_tokens=1, temperature=temperature)
        counts = np.bincount([int(sample.tokens[0]) for sample in samples], minlength=13)
        every = Batch(
            prompts=[[1, 2]],
            prompt_index=np.zeros(13, np.int32),
            responses=np.arange(13)[:, None],
            temperature=temperature,
        )
        table = (await run.do("forward", batch=every)).logprobs.values
        for sample in samples:
            assert sample.logprobs is not None
            assert sample.logprobs[0] == table[sample.tokens[0]]
        expected = np.exp(table.astype(np.float64))
        assert expected.sum() == pytest.approx(1, abs=1e-6)
        statistic = ((counts - 6000 * expected) ** 2 / (6000 * expected)).sum()
        assert statistic < 32.9  # the 0.999 quantile of chi squared with 12 degrees of freedom

    check()


@running
async def test_longer_responses_have_the_trainers_bits() -> None:
    run = await Run().start()
    prompts = [[1], [2, 3, 4, 5]]
    samples = await run.generate(prompts, n=20, max_tokens=9, temperature=0.7)
    groups = [
        Group(
            prompt=prompts[index],
            samples=samples[index * 20 : index * 20 + 20],
            temperature=0.7,
            prompt_index=index,
        )
        for index in range(2)
    ]
    batch = Batch.from_groups(groups)
    outputs = await run.do("forward", batch=batch, outputs={"logprobs", "entropy"})
    assert outputs.logprobs == batch.sampling_logprobs
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}
    for sample in samples:
        ended = len(sample) > 0 and sample.tokens[-1] == 12
        assert sample.finish_reason == ("stop" if ended else "length")
        assert 12 not in sample.tokens[:-1]


@running
async def test_temperature_zero_is_greedy_with_logprobs_at_one() -> None:
    run = await Run(eos_token_ids=()).start()
    samples = await run.generate(
        [[1, 2]], n=3, max_tokens=4, temperature=0, outputs={"logprobs", "drawn_logprobs"}
    )
    assert all(sample.tokens.tolist() == samples[0].tokens.tolist() for sample in samples)
    assert not samples[0].drawn_logprobs.any()
    context = [1, 2]
    for token, logprob in zip(samples[0].tokens.tolist(), samples[0].logprobs):
        every = Batch(
            prompts=[context],
            prompt_index=np.zeros(13, np.int32),
            responses=np.arange(13)[:, None],
            temperature=0.0,
        )
        table = (await run.do("forward", batch=every)).logprobs.values
        assert int(table.argmax()) == token
        assert table[token] == logprob
        context.append(token)


# -- truncation -----------------------------------------------------------------------------------


def oracle(table: np.ndarray, top_p: float, top_k: int | None, min_p: float) -> np.ndarray:
    kept = set(range(len(table)))
    chances = np.exp(table)
    if min_p > 0:
        kept = {token for token in kept if chances[token] >= min_p * chances.max()}
    if top_k is not None and top_k < len(table):
        kth = sorted((chances[token] for token in kept), reverse=True)[:top_k][-1]
        kept = {token for token in kept if chances[token] >= kth}
    if top_p < 1:
        total = sum(chances[token] for token in kept)
        held, chosen = 0.0, set()
        for token in sorted(kept, key=lambda token: (-chances[token], token)):
            if held >= top_p and chosen:
                break
            chosen.add(token)
            held += chances[token] / total
        kept = chosen
    result = np.full(len(table), -np.inf)
    total = sum(chances[token] for token in kept)
    for token in kept:
        if chances[token] == 0:
            continue
        result[token] = np.log(chances[token] / total)
    return result


def test_truncation_against_sets() -> None:
    random = np.random.default_rng(0)
    logits = random.standard_normal((40, 11)) * 2
    table = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for top_p, top_k, min_p in itertools.product(
        (1.0, 0.9, 0.35, 1e-9), (None, 1, 3, 11, 50), (0.0, 0.1, 1.0)
    ):
        cut = truncated(table, top_p=top_p, top_k=top_k, min_p=min_p)
        for row, held in zip(table, cut):
            wanted = oracle(row, top_p, top_k, min_p)
            assert np.array_equal(np.isinf(held), np.isinf(wanted)), (top_p, top_k, min_p)
            assert np.allclose(np.exp(held), np.exp(wanted), atol=1e-12)


def test_ties_at_the_kth_stay_and_at_the_edge_of_top_p_the_lower_id_comes_first() -> None:
    table = np.log(np.array([[0.25, 0.25, 0.25, 0.25]]))
    assert np.isfinite(truncated(table, top_p=1, top_k=2, min_p=0)).all()
    kept = np.isfinite(truncated(table, top_p=0.5, top_k=None, min_p=0))
    assert kept.tolist() == [[True, True, False, False]]


def test_draws_never_take_what_was_left_out() -> None:
    with np.errstate(divide="ignore"):
        table = np.log(np.array([[0.0, 0.5, 0.0, 0.5, 0.0]] * 4))
    chances = np.array([0.0, 0.5, np.nextafter(1, 0), 0.49999])
    assert draw(table, chances).tolist() == [1, 3, 3, 1]


@running
async def test_drawn_logprobs_are_of_the_truncated_distribution() -> None:
    run = await Run(eos_token_ids=()).start()
    samples = await run.generate(
        [[5]], n=200, max_tokens=1, top_k=3, top_p=0.9, outputs={"logprobs", "drawn_logprobs"}
    )
    every = Batch(
        prompts=[[5]],
        prompt_index=np.zeros(13, np.int32),
        responses=np.arange(13)[:, None],
        temperature=1.0,
    )
    table = (await run.do("forward", batch=every)).logprobs.values.astype(np.float64)
    wanted = oracle(table, 0.9, 3, 0.0)
    seen = {int(sample.tokens[0]) for sample in samples}
    assert seen == set(np.flatnonzero(np.isfinite(wanted)).tolist())
    for sample in samples:
        token = int(sample.tokens[0])
        assert sample.drawn_logprobs[0] == pytest.approx(wanted[token], abs=1e-5)
        assert sample.logprobs[0] == pytest.approx(table[token], abs=1e-6)


def test_ids_that_are_left_out() -> None:
    table = np.log(np.array([[0.5, 0.25, 0.125, 0.125], [0.1, 0.2, 0.3, 0.4]]))
    assert without(table, np.array([], np.int32)) is table
    kept = np.exp(without(table, np.array([0, 2], np.int32)))
    assert np.allclose(kept, [[0, 2 / 3, 0, 1 / 3], [0, 1 / 3, 0, 2 / 3]])


@pytest.mark.parametrize("cut", [{}, {"top_k": 3}, {"min_p": 0.3}, {"top_p": 0.7}], ids=str)
def test_ends_come_after_min_tokens_with_the_logprobs_of_both_distributions(
    cut: dict[str, float],
) -> None:
    @running
    async def check() -> None:
        run = await Run(eos_token_ids=(12,)).start()
        outputs = {"logprobs", "drawn_logprobs"}
        given = {"n": 60, "max_tokens": 4, "min_tokens": 2, "stop_token_ids": (1, 3, 4)}
        samples = await run.generate([[5]], outputs=outputs, **given, **cut)
        ends = [1, 3, 4, 12]
        early = {int(token) for sample in samples for token in sample.tokens[:2]}
        assert not early & set(ends)
        assert {len(sample) for sample in samples} == {3, 4}, "some ended right after two"
        for sample in samples[:20]:
            for position, token in enumerate(sample.tokens.tolist()):
                every = Batch(
                    prompts=[[5, *sample.tokens[:position].tolist()]],
                    prompt_index=np.zeros(13, np.int32),
                    responses=np.arange(13)[:, None],
                    temperature=1.0,
                )
                full = (await run.do("forward", batch=every)).logprobs.values.astype(np.float64)
                left = full.copy()
                if position < 2:
                    left[ends] = -np.inf
                wanted = oracle(left, **{"top_p": 1.0, "top_k": None, "min_p": 0.0, **cut})
                assert sample.logprobs[position] == pytest.approx(full[token], abs=1e-6)
                assert sample.drawn_logprobs[position] == pytest.approx(wanted[token], abs=1e-5)

    check()


@running
async def test_min_tokens_holds_for_greedy_responses() -> None:
    run = await Run(eos_token_ids=()).start()
    (free,) = await run.generate([[1, 2]], max_tokens=4, temperature=0)
    ends = tuple(set(free.tokens.tolist()))
    given = {"max_tokens": 4, "temperature": 0, "stop_token_ids": ends}
    (short,) = await run.generate([[1, 2]], **given)
    assert (len(short), short.finish_reason) == (1, "stop")
    outputs = {"logprobs", "drawn_logprobs"}
    (late,) = await run.generate([[1, 2]], min_tokens=2, outputs=outputs, **given)
    assert not set(late.tokens[:2].tolist()) & set(ends)
    assert (late.logprobs[:2] < 0).all()
    assert not late.drawn_logprobs.any()


@running
async def test_outputs_select_what_comes_back() -> None:
    run = await Run().start()
    for outputs in (set(), {"logprobs"}, {"drawn_logprobs"}):
        (sample,) = await run.generate([[1]], max_tokens=2, outputs=outputs)
        for name in ("logprobs", "drawn_logprobs"):
            assert (getattr(sample, name) is not None) == (name in outputs)


# -- ends -----------------------------------------------------------------------------------------


def feed(stops: tuple[str, ...], ids: list[int], first: int = 0) -> tuple[int, int]:
    """Position of the token that completes a stop string, and of the first token of the match."""
    watch = StopStrings(stops, 1, first)
    for position, token in enumerate(ids):
        found = watch.add(np.array([0]), np.array([token], np.int32), position)
        if found[0] >= 0:
            return position, int(found[0])
    return -1, -1


def test_stop_strings() -> None:
    encode = TOKENS.encode
    assert feed(("ab",), encode("xxab")) == (3, 2)
    assert feed(("ab", "xab"), encode("xxab")) == (3, 1)  # the longest
    assert feed(("b", "zz"), encode("xxab")) == (3, 3)
    assert feed(("aab",), encode("aaab")) == (3, 1)
    assert feed(("é",), encode("caféx")) == (4, 3)
    assert feed(("é",), [0xC3, 0xC3, 0xA9]) == (2, 1)  # after a character that never ended
    assert feed(("b",), [0xE2, 0x82, ord("b")]) == (2, 2)  # after one that is not complete yet
    assert feed(("ab",), [ord("a"), TOKENS.pad_token_id, ord("b")]) == (2, 0)
    assert feed(("abc",), encode("ab")) == (-1, -1)
    assert feed((), encode("ab")) == (-1, -1)


def test_stop_strings_that_are_complete_too_early_never_count() -> None:
    encode = TOKENS.encode
    assert feed(("ab",), encode("abxab"), first=1) == (1, 0)
    assert feed(("ab",), encode("abxab"), first=2) == (4, 3)
    assert feed(("ab", "xyz"), encode("xabx"), first=3) == (-1, -1)  # still in the tail, and past
    assert feed(("ab",), [*encode("ab"), TOKENS.pad_token_id], first=2) == (-1, -1)


@running
async def test_a_stop_string_leaves_its_tokens_out_and_a_stop_id_stays() -> None:
    run = await Run(**BYTES).start()
    prompts = [TOKENS.encode("2+2=")]
    (whole,) = await run.generate(prompts, max_tokens=40, seed=3)
    assert whole.finish_reason == "length"
    tokens = whole.tokens.tolist()
    first = next(at for at in range(5, 30) if max(tokens[at : at + 2]) < 128)
    stop = bytes(tokens[first : first + 2]).decode()
    (cut,) = await run.generate(prompts, max_tokens=40, seed=3, stop=(stop, "never there"))
    assert cut.finish_reason == "stop"
    assert cut.tokens.tolist() == tokens[:first]
    assert np.array_equal(cut.logprobs, whole.logprobs[:first])
    (kept,) = await run.generate(prompts, max_tokens=40, seed=3, stop_token_ids=(tokens[first],))
    at = tokens.index(tokens[first])
    assert kept.tokens.tolist() == tokens[: at + 1]
    assert kept.finish_reason == "stop"


@running
async def test_what_completes_a_stop_string_stays_where_it_is_included() -> None:
    run = await Run(**BYTES).start()
    prompts = [TOKENS.encode("2+2=")]
    (whole,) = await run.generate(prompts, max_tokens=40, seed=3)
    tokens = whole.tokens.tolist()
    first = next(at for at in range(5, 30) if max(tokens[at : at + 2]) < 128)
    stop = bytes(tokens[first : first + 2]).decode()
    given = {"max_tokens": 40, "seed": 3, "stop": (stop, "never there"), "include_stop": True}
    (kept,) = await run.generate(prompts, **given)
    assert kept.finish_reason == "stop"
    assert kept.tokens.tolist() == tokens[: first + 2]
    assert np.array_equal(kept.logprobs, whole.logprobs[: first + 2])
    (later,) = await run.generate(prompts, min_tokens=first + 2, **given)
    assert later.tokens.tolist() == tokens
    (at_once,) = await run.generate(prompts, min_tokens=first + 1, **given)
    assert at_once.tokens.tolist() == kept.tokens.tolist()


@running
async def test_include_stop_without_stop_strings_changes_nothing() -> None:
    run = await Run(**BYTES).start()
    given = {"n": 4, "max_tokens": 9, "seed": 3, "stop_token_ids": tuple(range(40))}
    plain = await run.generate([[1], [2]], **given)
    assert await run.generate([[1], [2]], include_stop=True, **given) == plain


@running
async def test_a_stop_string_in_the_first_token_leaves_an_empty_response() -> None:
    run = await Run(**BYTES).start()
    samples = await run.generate(
        [[1]], n=64, max_tokens=3, stop=tuple(chr(code) for code in range(1, 128))
    )
    empty = [sample for sample in samples if len(sample) == 0]
    assert empty
    for sample in empty:
        assert sample.finish_reason == "stop"
        assert len(sample.logprobs) == 0


# -- seeds ----------------------------------------------------------------------------------------


@running
async def test_a_samples_draws_depend_on_seed_prompt_and_index_only() -> None:
    run = await Run().start()
    prompts = [[1], [1], [4, 5]]
    alone = await run.generate(prompts, n=2, max_tokens=8, seed=11)
    again = await run.generate(prompts, n=2, max_tokens=8, seed=11)
    assert alone == again
    more = await run.generate(prompts, n=5, max_tokens=8, seed=11)
    assert [more[0], more[1], more[5], more[6], more[10], more[11]] == alone
    crowd = [run.begin(prompts, n=2, max_tokens=8, seed=seed)[0] for seed in (11, 12, 13, 11)]
    results = await asyncio.gather(*crowd)
    assert results[0] == results[3] == alone
    assert results[1] != alone
    shorter = await run.generate(prompts, n=2, max_tokens=3, seed=11)
    for short, long in zip(shorter, alone):
        assert np.array_equal(short.tokens, long.tokens[:3])


@running
async def test_scheduling_hints_change_nothing() -> None:
    run = await Run().start()
    plain = await run.generate([[1]], n=4, max_tokens=5, seed=1)
    hinted = await run.generate(
        [[1]], n=4, max_tokens=5, seed=1, session_id="a", priority=3, cache_salt="b"
    )
    assert plain == hinted


def test_uniform_numbers_are_uniform_and_independent() -> None:
    from backends.mock.sampling_math import random_keys

    size = 20000
    keys = random_keys(5, np.arange(size) // 100, np.arange(size) % 100)
    assert len(np.unique(keys)) == size
    columns = np.stack([uniform(keys, position) for position in range(3)])
    assert columns.min() >= 0
    assert columns.max() < 1
    assert np.allclose(columns.mean(axis=1), 0.5, atol=0.01)
    assert np.abs(np.corrcoef(columns) - np.eye(3)).max() < 0.03
    for values in columns:
        counts = np.histogram(values, 20, (0, 1))[0]
        assert ((counts - size / 20) ** 2 / (size / 20)).sum() < 43.8  # chi squared, 0.999


# -- refusals -------------------------------------------------------------------------------------
