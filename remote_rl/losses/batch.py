"""Losses: a batch's per-token fields as flat arrays of one namespace (imports numpy, attrs,
array-api-compat, remote_rl.types)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt
from array_api_compat import is_numpy_array, is_torch_array

from ..errors import UnsupportedError
from .base import Array

if TYPE_CHECKING:
    from ..types import Batch, Ragged

_FIELDS = ("advantages", "old_logprobs", "ref_logprobs", "importance_weights")


@attrs.frozen(kw_only=True, eq=False)
class LossBatch:
    """What a loss reads of a batch: arrays [total] over all response tokens, row after row.

    mask: 1 where the token counts, 0 elsewhere, in the dtype of the other fields.
    advantages, old_logprobs, ref_logprobs, importance_weights: or None.
    rows: [total] int64, the row of each token. row_tokens: [n], counted tokens of each row.
    boundaries: [n + 1] int64, `offsets` in the namespace of the other arrays.
    offsets: [n + 1], numpy int64, on the host: row i is entries offsets[i] to offsets[i + 1].
    tokens, sequences: counted tokens, and rows with at least one.
    """

    mask: Array
    advantages: Array | None = None
    old_logprobs: Array | None = None
    ref_logprobs: Array | None = None
    importance_weights: Array | None = None
    rows: Array
    row_tokens: Array
    boundaries: Array
    offsets: npt.NDArray[np.int64]
    tokens: int
    sequences: int

    @classmethod
    def from_batch(
        cls,
        batch: Batch,
        convert: Callable[[npt.NDArray[Any]], Array],
        dtype: npt.DTypeLike = np.float32,
    ) -> LossBatch:
        """The fields of `batch` in `dtype` (that of the outputs), each passed through `convert`:
        the identity for numpy, e.g. `lambda array: torch.as_tensor(array, device=device)` for
        torch. An array it receives is writable and shared with nothing, unless it has the right
        dtype already and is writable."""

        def flat(field: Ragged | None) -> Array | None:
            return None if field is None else convert(_own(field.values, dtype))

        offsets = np.asarray(batch.mask.offsets, dtype=np.int64)
        counts = tokens_per_row(batch.mask)
        lengths = np.diff(offsets)
        return cls(
            mask=flat(batch.mask),
            rows=convert(np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)),
            row_tokens=convert(_own(counts, dtype)),
            boundaries=convert(_own(offsets, np.int64)),
            offsets=offsets,
            tokens=int(counts.sum()),
            sequences=int(np.count_nonzero(counts)),
            **{name: flat(getattr(batch, name)) for name in _FIELDS},
        )


def tokens_per_row(mask: Ragged) -> npt.NDArray[np.int64]:
    """[n], how many tokens of each row have mask 1."""
    ones = np.asarray(mask.values, dtype=np.int64)
    running = np.concatenate([np.zeros(1, np.int64), np.cumsum(ones, dtype=np.int64)])
    counts: npt.NDArray[np.int64] = running[mask.offsets[1:]] - running[mask.offsets[:-1]]
    return counts


def segment_sum(values: Array, boundaries: Array) -> Array:
    """[n], the float64 sum of values[boundaries[i] : boundaries[i + 1]]; 0 for an empty row.

    The one operation that the array API lacks, so it has a version for numpy and one for torch.
    Both add in a fixed order.
    """
    if is_numpy_array(values):
        padded = np.append(values.astype(np.float64), 0.0)
        sums = np.add.reduceat(padded, boundaries[:-1]) if len(boundaries) > 1 else padded[:0]
        return np.where(boundaries[1:] > boundaries[:-1], sums, 0.0)
    if is_torch_array(values):
        import torch

        wide = values.to(torch.float64)
        if len(boundaries) == 1:
            return wide[:0]
        return torch.segment_reduce(wide, "sum", offsets=boundaries, axis=0, initial=0.0)
    raise UnsupportedError(
        f"segment_sum has a version for numpy and for torch, not for {type(values).__module__}"
    )


def _own(array: npt.NDArray[Any], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    # torch warns on read-only memory, and arrays that came over a transport are read-only
    converted = array.astype(dtype, copy=False)
    return converted if converted.flags.writeable else converted.copy()
