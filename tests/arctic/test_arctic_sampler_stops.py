"""Stop strings: found on bytes, in the token that holds their first one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampler_tokenizers import byte_fallback, byte_level, save, word_piece

from backends.arctic.sampling.stops import StopStrings, TokenBytes, token_bytes

TOKENIZER = byte_level()
TABLE = TokenBytes(TOKENIZER)
SIZE = len(TOKENIZER)


def _stopped(tokens: list[int], *stops: str, table: Any = TABLE, first: int = 0) -> int | None:
    """Length of the sample that these tokens end as, None where they go on."""
    strings = StopStrings(stops, table, first)
    for position, token in enumerate(tokens):
        place = strings.add(token, position)
        if place is not None:
            return place
    return None


def _ids(text: str) -> list[int]:
    return [int(token) for token in TOKENIZER.encode(text)]


def test_tokens_read_as_the_tokenizer_reads_them() -> None:
    text = "Grüße 🙂, the end"
    assert b"".join(TABLE[token] for token in _ids(text)).decode() == text
    assert TABLE.agrees()
    assert TokenBytes(byte_fallback()).agrees()
    assert not TokenBytes(word_piece()).agrees()


def test_special_tokens_are_no_text_and_added_ones_are() -> None:
    special, added = TOKENIZER.convert_tokens_to_ids(["<eos>", "<think>"])
    assert TABLE[special] == b""
    assert TABLE[added] == b"<think>"
    assert _stopped([special], "<eos>") is None
    assert _stopped([*_ids("a"), added], "think") == 1


def test_an_id_without_a_token_is_no_text() -> None:
    assert TABLE[SIZE + 50] == b""


def test_tokens_from_the_first_that_holds_part_of_it_on_are_left_out() -> None:
    tokens = _ids("one and two")
    text = [TABLE[token].decode() for token in tokens]
    place = next(place for place in range(len(text)) if "d" in text[place])
    assert _stopped(tokens, "d two") == place
    assert _stopped(tokens, "three") is None


def test_a_character_that_is_spread_over_tokens_is_found_at_its_first_byte() -> None:
    smile = "🙂".encode()
    single = {TABLE[token]: token for token in range(SIZE) if len(TABLE[token]) == 1}
    spread = [single[bytes([byte])] for byte in smile]
    assert _stopped([single[b"a"], *spread, single[b"b"]], "🙂") == 1
    assert _stopped([*spread[:3]], "🙂") is None
    assert _stopped([*spread, single[b"b"]], "b") == 4


def test_the_earliest_wins_and_of_these_the_longest() -> None:
    added = TOKENIZER.convert_tokens_to_ids("<think>")
    single = {TABLE[token]: token for token in range(SIZE) if len(TABLE[token]) == 1}
    letters = [single[bytes([byte])] for byte in b"xy<"]
    assert _stopped([*letters, added], "think", "y<<") == 1
    assert _stopped([*letters, added], "<t", "<<th") == 2


def test_what_is_complete_too_early_never_counts() -> None:
    single = {TABLE[token]: token for token in range(SIZE) if len(TABLE[token]) == 1}
    letters = [single[bytes([byte])] for byte in b"abxab"]
    assert _stopped(letters, "ab", first=1) == 0
    assert _stopped(letters, "ab", first=2) == 3
    # it stays in the tail as long as a longer one may come
    assert _stopped(letters[:4], "ab", "never there", first=2) is None
    [special] = TOKENIZER.convert_tokens_to_ids(["<eos>"])
    assert _stopped([*letters[:2], special], "ab", first=2) is None


single_tokens = st.lists(st.integers(0, SIZE - 1), max_size=40)
stop_texts = st.lists(st.text("aeht <n🙂", min_size=1, max_size=4), min_size=1, max_size=3)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(single_tokens, stop_texts, st.integers(0, 12))
def test_as_a_search_in_the_whole_text_finds_it(
    tokens: list[int], stops: list[str], first: int
) -> None:
    expected = None
    for length in range(first + 1, len(tokens) + 1):
        pieces = [TABLE[token] for token in tokens[:length]]
        known, text = len(b"".join(pieces[:-1])), b"".join(pieces)
        found = [
            place
            for place in range(len(text))
            for stop in map(str.encode, stops)
            if text.startswith(stop, place) and place + len(stop) > known
        ]
        if found:
            ends = [len(b"".join(pieces[: token + 1])) for token in range(length)]
            expected = next(token for token in range(length) if ends[token] > min(found))
            break
    assert _stopped(tokens, *stops, first=first) == expected


def test_byte_fallback_tokens_are_bytes() -> None:
    tokenizer = byte_fallback()
    table = TokenBytes(tokenizer)
    [the, space, end] = tokenizer.convert_tokens_to_ids(["▁the", "▁", "end"])
    [high, low] = tokenizer.convert_tokens_to_ids(["<0xC3>", "<0xBC>"])
    assert _stopped([the, space, end], " end", table=table) == 1
    assert _stopped([the, high, low], "ü", table=table) == 1


def test_what_offers_no_stop_strings(tmp_path: Path) -> None:
    assert token_bytes(tmp_path) is None
    assert token_bytes(save(word_piece(), tmp_path / "words")) is None
    assert token_bytes(save(byte_level(), tmp_path / "bytes")) is not None


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_a_saved_tokenizer_reads_as_before(make: Any, tmp_path: Path) -> None:
    table, loaded = TokenBytes(make()), token_bytes(save(make(), tmp_path))
    assert loaded is not None
    assert [loaded[token] for token in range(300)] == [table[token] for token in range(300)]
