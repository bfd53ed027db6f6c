"""Contract: arrays in and out of the types (imports numpy and errors)."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import InvalidRequestError


class TensorLike(Protocol):
    """A torch tensor, as far as type checkers need to know without torch."""

    def detach(self) -> Any: ...


Array: TypeAlias = "npt.NDArray[Any]"


def to_numpy(data: Any, what: str = "the array") -> Array:
    """`data` as a numpy array; a torch tensor is shared where it lies in host memory. `what`: the
    name that errors use."""
    if isinstance(data, np.ndarray):
        return data
    if hasattr(data, "detach"):
        data = data.detach()
        if data.device.type != "cpu":
            data = data.cpu()
        if str(data.dtype) == "torch.bfloat16":  # numpy has no such dtype; float32 holds it exactly
            data = data.float()
        result: Array = data.numpy()
        return result
    try:
        return np.asarray(data)
    except ValueError as error:  # rows of different lengths
        raise InvalidRequestError(
            f"{what} must be an array, but the rows of what was given differ in length",
            field=what.rpartition(".")[2],
        ) from error


def cast_array(
    array: Array, dtype: npt.DTypeLike, what: str, offsets: Array | None = None
) -> Array:
    """`array` in `dtype`, without a copy where it already is. A value that `dtype` can't hold is
    refused, with its place; rounding to a shorter float is not. `offsets`: of the rows, if any."""
    target = np.dtype(dtype)
    if array.dtype == target:
        return array
    if array.size == 0:
        return array.astype(target)
    field = what.rpartition(".")[2]
    if array.dtype.kind not in "biuf":
        raise InvalidRequestError(f"{what} must hold numbers, not {array.dtype}", field=field)
    with np.errstate(over="ignore", invalid="ignore"):
        result = array.astype(target)
    lost = _lost(array, result)
    if lost is not None and lost.any():
        position = int(np.argmax(lost))
        place, details = _place(position, offsets)
        value = array.reshape(-1)[position]
        whole = target.kind == "f" or (np.isfinite(value) and value == np.trunc(value))
        problem = f"outside {target}" if whole else "not a whole number"
        raise InvalidRequestError(
            f"{place} of {what} is {value}, {problem}", field=field, **details
        )
    return result


def _lost(array: Array, result: Array) -> Array | None:
    """Which entries the cast from `array` to `result` spoilt; None where none can be."""
    source, target = array.dtype, result.dtype
    if target.kind == "f":
        if source.kind != "f" or source.itemsize <= target.itemsize:
            return None
        infinite: Array = np.isinf(result)
        overflown: Array = infinite & np.isfinite(array)
        return overflown
    if target.kind not in "iu" or np.can_cast(source, target):
        return None
    limits = np.iinfo(target)
    if source.kind == "f":
        # the bound one above the greatest integer is exact in float64, the greatest may not be
        above = np.float64(limits.max) + (1 if target.itemsize < 8 else 0)
        inside = (array >= np.float64(limits.min)) & (array < above)
        spoilt: Array = ~(inside & (array == np.trunc(array)))
        return spoilt
    if int(array.min()) >= limits.min and int(array.max()) <= limits.max:
        return None
    outside: Array = ~((array >= limits.min) & (array <= limits.max))
    return outside


def _place(position: int, offsets: Array | None) -> tuple[str, dict[str, int]]:
    if offsets is None:
        return f"entry {position}", {"row": position}
    row = int(np.searchsorted(offsets, position, side="right") - 1)
    token = position - int(offsets[row])
    return f"token {token} of row {row}", {"row": row, "token": token}


def offsets_of(lengths: Any) -> Array:
    """[rows + 1] int64 offsets of rows with these lengths."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def row_indices(rows: Any, count: int) -> Array:
    """Indices or a boolean mask as int64 indices in range, negative ones counted from the end."""
    chosen = to_numpy(rows)
    if chosen.dtype == bool:
        if chosen.shape != (count,):
            raise InvalidRequestError(f"a mask of rows must have shape ({count},)")
        return np.flatnonzero(chosen)
    indices = cast_array(chosen.reshape(-1), np.int64, "row indices")
    if indices.size and (indices.min() < -count or indices.max() >= count):
        raise InvalidRequestError(f"row indices must lie in 0..{count - 1}, not {brief(indices)}")
    return np.where(indices < 0, indices + count, indices)


def brief(array: Array) -> str:
    """A few of its numbers, for messages."""
    shown = array.tolist()
    return str(shown) if len(shown) <= 8 else f"[{', '.join(map(str, shown[:7]))}, ...]"
