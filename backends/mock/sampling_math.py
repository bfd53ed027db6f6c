"""Mock backend: truncation, random numbers and stop strings (imports numpy, the model's types).

Truncation is vLLM's: first the ids that min_tokens doesn't let come yet, then min-p on the
distribution at the temperature, then top-k on what is left, then top-p on the renormalised rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .model import Floats, Ids

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def _scramble(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    # the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def random_keys(
    seed: int, prompt_index: npt.NDArray[np.int64], index: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint64]:
    """[rows] uint64, one key for each sample (prompt, index) of a request with this seed."""
    start = np.full(len(index), (seed * _GOLDEN + 1) & _MASK, np.uint64)
    keys = _scramble(_scramble(start) + prompt_index.astype(np.uint64) * np.uint64(_GOLDEN))
    return _scramble(keys + index.astype(np.uint64) * np.uint64(_GOLDEN))


def uniform(keys: npt.NDArray[np.uint64], position: int) -> Floats:
    """[rows] in [0, 1), the draw of each sample for the token at `position`: a function of seed,
    prompt, sample and position alone."""
    mixed = _scramble(keys + np.uint64((position + 1) * _GOLDEN & _MASK))
    result: Floats = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return result


def without(table: Floats, ids: Ids) -> Floats:
    """[rows, V] log probabilities renormalised without these ids, which are -inf; table itself
    where there are none. One id at least must be left."""
    if not len(ids):
        return table
    table = table.copy()
    table[:, ids] = -np.inf
    return _renormalised(table)


def truncated(table: Floats, *, top_p: float, top_k: int | None, min_p: float) -> Floats:
    """[rows, V] log probabilities of the truncated, renormalised distributions, -inf where left
    out; table [rows, V] itself where nothing is.

    min_p: less likely than min_p times the likeliest are left out. top_k: all but the k likeliest;
    what ties with the k-th stays. top_p: the fewest likeliest that hold at least top_p together,
    at least one; of equal ones the lower id first.
    """
    if min_p > 0:
        floor = table.max(axis=1, keepdims=True) + np.log(min_p)
        table = np.where(table >= floor, table, -np.inf)
    if top_k is not None and top_k < table.shape[1]:
        kth = np.partition(table, -top_k, axis=1)[:, -top_k, None]
        table = np.where(table >= kth, table, -np.inf)
    if top_p < 1:
        table = _nucleus(_renormalised(table), top_p)
    return _renormalised(table) if (min_p > 0 or top_k is not None or top_p < 1) else table


def _nucleus(table: Floats, top_p: float) -> Floats:
    ordered = np.sort(table, axis=1)[:, ::-1]
    chances = np.exp(ordered)
    sizes = np.maximum((np.cumsum(chances, axis=1) - chances < top_p).sum(axis=1), 1)[:, None]
    least = np.take_along_axis(ordered, sizes - 1, axis=1)
    above, equal = table > least, table == least
    wanted = sizes - above.sum(axis=1, keepdims=True)  # of those that tie with the last one kept
    return np.where(above | (equal & (np.cumsum(equal, axis=1) <= wanted)), table, -np.inf)


def _renormalised(table: Floats) -> Floats:
    with np.errstate(divide="ignore"):
        total = np.log(np.exp(table).sum(axis=1, keepdims=True))
    result: Floats = table - total
    return result


def draw(table: Floats, chances: Floats) -> Ids:
    """[rows] ids by the inverse of each row's cumulative distribution at chances [rows] in [0, 1);
    an id of probability zero is never drawn."""
    probabilities = np.exp(table)
    cumulative = np.cumsum(probabilities, axis=1)
    chosen = (cumulative <= chances[:, None] * cumulative[:, -1:]).sum(axis=1)
    last = table.shape[1] - 1 - np.argmax(probabilities[:, ::-1] > 0, axis=1)
    result: Ids = np.minimum(chosen, last).astype(np.int32)
    return result


class StopStrings:
    """The tail of each row's text as bytes, and the token that each byte came from. first: position
    from which on a token may complete a match.

    A byte token holds one byte, any other token none; as no UTF-8 character is part of another,
    a match of bytes is a match of text, also after a character that is not complete yet.
    """

    def __init__(self, stops: Sequence[str], rows: int, first: int = 0) -> None:
        self._first = first
        patterns = sorted({stop.encode("utf-8") for stop in stops}, key=len, reverse=True)
        self._patterns = [np.frombuffer(pattern, np.uint8) for pattern in patterns]
        width = max(map(len, self._patterns), default=0)
        self._bytes = np.full((rows, width), -1, np.int16)
        self._tokens = np.zeros((rows, width), np.int64)

    def add(self, rows: npt.NDArray[np.int64], tokens: Ids, position: int) -> Ids:
        """Takes in the token at `position` of each row; [rows] int32, the position of the first
        token of a stop string (the longest) that is now complete, -1 where there is none."""
        found = np.full(len(rows), -1, np.int32)
        if not self._patterns:
            return found
        textual = np.flatnonzero(tokens < 256)
        chosen = rows[textual]
        self._bytes[chosen, :-1] = self._bytes[chosen, 1:]
        self._tokens[chosen, :-1] = self._tokens[chosen, 1:]
        self._bytes[chosen, -1] = tokens[textual]
        self._tokens[chosen, -1] = position
        if position < self._first:
            return found
        tails = self._bytes[chosen]
        for pattern in self._patterns:
            matches = (tails[:, -len(pattern) :] == pattern).all(axis=1)
            fresh = textual[matches & (found[textual] < 0)]
            found[fresh] = self._tokens[rows[fresh], -len(pattern)]
        return found
