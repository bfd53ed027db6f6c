"""Arctic backend: the random numbers of a sample, a function of its seed, prompt, index and
position alone (imports numpy).

vLLM's own seeded generators depend on how often a request was scheduled: on a CPU they fail where a
prompt is computed in pieces, and a sample must not depend on what else is in flight.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def _scramble(state: Words) -> Words:
    # the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def sample_key(seed: int, prompt_index: int, index: int) -> int:
    """The key of a sample, [0, 2**63)."""
    word = np.array([seed], np.uint64)
    for part in (prompt_index, index):
        word = _scramble(word) + np.uint64((part * _GOLDEN) & _MASK)
    return int(_scramble(_scramble(word))[0] >> np.uint64(1))


def draw_seeds(
    keys: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """[rows] int64 in [0, 2**63): the seed of the draw at each row's position."""
    steps = (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    mixed = _scramble(keys.astype(np.uint64)) + steps
    return (_scramble(mixed) >> np.uint64(1)).astype(np.int64)
