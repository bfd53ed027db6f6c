"""Arctic backend: which rank computes which rows, and in which pieces (imports numpy and the
contract's Batch).

The cost of rows is the number of tokens that are computed for them (`packed_tokens`): all
but the last of each, and each of their prompts once per rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from remote_rl.types import Batch

Rows: TypeAlias = npt.NDArray[np.int64]

#: how much more than the mean the fullest rank may have before groups are split
_TOLERATED = 1.1


@attrs.frozen(eq=False)
class Share:
    """What one rank computes. rows: of the whole batch, in the rank's order. pieces: positions
    into them, one array for each forward and backward pass, possibly empty."""

    rows: Rows
    pieces: tuple[Rows, ...]


def shares(batch: Batch, ranks: int, token_budget: int) -> list[Share]:
    """One for each rank, all with the same number of pieces, since ranks meet in each pass.

    Rows of one prompt stay together where that leaves no rank with more than 1.1 times the mean;
    otherwise they are dealt out one by one, to ranks that have their prompt where it costs least. A
    piece has at most `token_budget` tokens, or one row that alone has more.
    """
    lengths = np.maximum(batch.responses.lengths - 1, 0)
    prompts = batch.prompts.lengths[batch.prompt_index] if len(batch) else lengths
    order = np.argsort(batch.prompt_index, kind="stable")
    starts = np.flatnonzero(np.diff(batch.prompt_index[order], prepend=-1))
    groups = [group for group in np.split(order, starts[1:]) if len(group)]
    whole = _deal(groups, lengths, prompts, batch.prompt_index, ranks)
    if len(groups) and _imbalance(whole) > _TOLERATED:
        single = [row[None] for row in order]
        split = _deal(single, lengths, prompts, batch.prompt_index, ranks)
        whole = min(whole, split, key=lambda deal: max(load for load, _ in deal))
    dealt = [
        np.sort(np.concatenate([np.empty(0, np.int64), *own])).astype(np.int64) for _, own in whole
    ]
    cuts = [_cut(rows, lengths, prompts, batch.prompt_index, token_budget) for rows in dealt]
    count = max(1, *map(len, cuts))
    empty = np.empty(0, np.int64)
    return [Share(rows, (*own, *(empty,) * (count - len(own)))) for rows, own in zip(dealt, cuts)]


def _imbalance(dealt: list[tuple[int, list[Rows]]]) -> float:
    loads = [load for load, _ in dealt]
    return max(loads) / max(sum(loads) / len(loads), 1e-9)


def _deal(
    groups: Iterable[Rows], lengths: Rows, prompts: Rows, prompt_index: Rows, ranks: int
) -> list[tuple[int, list[Rows]]]:
    """The longest first, each to the rank that then has least (longest processing time first,
    R. L. Graham 1969): load and groups of each rank."""
    loads, own = [0] * ranks, [list[Rows]() for _ in range(ranks)]
    held: list[set[int]] = [set() for _ in range(ranks)]
    costs = [(int(lengths[group].sum()), group) for group in groups]
    for cost, group in sorted(costs, key=lambda pair: (-pair[0], int(pair[1][0]))):
        prompt, size = int(prompt_index[group[0]]), int(prompts[group[0]])
        after = [load + cost + (0 if prompt in have else size) for load, have in zip(loads, held)]
        best = min(range(ranks), key=after.__getitem__)
        loads[best] = after[best]
        held[best].add(prompt)
        own[best].append(group)
    return list(zip(loads, own))


def _cut(rows: Rows, lengths: Rows, prompts: Rows, prompt_index: Rows, budget: int) -> list[Rows]:
    """Positions into `rows` for each piece, rows of a prompt next to each other."""
    pieces: list[Rows] = []
    piece: list[int] = []
    size, last = 0, -1
    for place in np.argsort(prompt_index[rows], kind="stable"):
        row = rows[place]
        prompt = int(prompt_index[row])
        more = int(lengths[row]) + (0 if prompt == last and piece else int(prompts[row]))
        if piece and size + more > budget:
            pieces.append(np.array(piece, np.int64))
            piece, size = [], 0
            more = int(lengths[row]) + int(prompts[row])
        piece.append(int(place))
        size, last = size + more, prompt
    if piece:
        pieces.append(np.array(piece, np.int64))
    return pieces
