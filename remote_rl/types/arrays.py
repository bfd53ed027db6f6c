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


def to_numpy(data: Any) -> Array:
    """`data` as a numpy array; a torch tensor is shared where it lies in host memory."""
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
    return np.asarray(data)


def cast_array(array: Array, dtype: npt.DTypeLike, what: str) -> Array:
    """`array` in `dtype` without a copy where it already is; refuses what would lose a value."""
    target = np.dtype(dtype)
    if array.dtype == target:
        return array
    if array.size == 0:
        return array.astype(target)
    if array.dtype.kind not in "biuf":
        raise InvalidRequestError(f"{what} must hold numbers, not {array.dtype}", field=what)
    if target.kind in "iu":
        if array.dtype.kind == "f" and not np.array_equal(array, np.trunc(array)):
            raise InvalidRequestError(f"{what} must hold whole numbers, not {array.dtype}")
        limits = np.iinfo(target)
        if array.dtype.kind != "b" and (array.min() < limits.min or array.max() > limits.max):
            raise InvalidRequestError(
                f"{what} holds {array.min()}..{array.max()}, outside {target}", field=what
            )
    return array.astype(target)


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
