"""Contract: rows of different lengths in one flat array (imports numpy, attrs, errors, fields)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias, Union, cast, overload

import attrs
import numpy as np
import numpy.typing as npt

from ..errors import InvalidRequestError
from .arrays import Array, TensorLike, brief, cast_array, offsets_of, row_indices, to_numpy

__all__ = ["Array", "Ragged", "RaggedLike", "Side"]


RaggedLike: TypeAlias = Union["Ragged", Sequence[Any], Array, TensorLike]
Side: TypeAlias = Literal["left", "right"]


def _offsets(data: Any) -> Array:
    return cast_array(to_numpy(data), np.int64, "Ragged.offsets")


@attrs.frozen(eq=False, repr=False)
class Ragged:
    """Rows of different lengths, without padding.

    values:  [total], one-dimensional, any numeric dtype; row i is values[offsets[i]:offsets[i + 1]]
    offsets: [rows + 1], int64, starts at 0, never falls, ends at total

    Nothing is copied where the arguments already have the dtype and layout. The arrays are shared,
    so don't write to them while an operation that carries them is in flight.
    Raises `InvalidRequestError` where the two arrays don't fit.
    """

    values: Array = attrs.field(converter=to_numpy)
    offsets: Array = attrs.field(converter=_offsets)
    _highest_id: int | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        if self.values.ndim != 1 or self.offsets.ndim != 1:
            raise InvalidRequestError(
                f"Ragged takes one-dimensional arrays, not values {self.values.shape} and offsets "
                f"{self.offsets.shape}; for a padded array use Ragged.from_padded"
            )
        if self.values.dtype.kind not in "biuf":
            raise InvalidRequestError(
                f"Ragged.values must hold numbers, not {self.values.dtype}; text is tokenised first"
            )
        offsets = self.offsets
        if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(self.values):
            raise InvalidRequestError(
                f"Ragged.offsets must run from 0 to the number of values ({len(self.values)}), "
                f"not {brief(offsets)}"
            )
        if len(offsets) > 1 and bool((offsets[1:] < offsets[:-1]).any()):
            row = int(np.argmax(offsets[1:] < offsets[:-1]))
            raise InvalidRequestError(f"Ragged.offsets falls at row {row}; it may only rise")

    # -- building ---------------------------------------------------------------------------

    @classmethod
    def of(cls, data: RaggedLike, dtype: npt.DTypeLike | None = None, what: str = "rows") -> Ragged:
        """`data` in whichever form the caller has it: a Ragged, rows (lists or arrays), a dense
        array [rows, width] without padding, or a torch nested (jagged) tensor.

        `dtype`: what the values are cast to; a cast that would change a value is refused.
        `what`: the name that errors use.
        """
        if isinstance(data, Ragged):
            ragged = data
        elif getattr(data, "is_nested", False):
            ragged = cls.from_torch(data)
        elif hasattr(data, "ndim") and data.ndim == 2:
            dense = np.ascontiguousarray(to_numpy(data))
            rows, width = dense.shape
            ragged = cls(dense.reshape(-1), np.arange(rows + 1, dtype=np.int64) * width)
        else:
            return cls.from_rows(cast(Iterable[Any], data), dtype=dtype, what=what)
        if dtype is None or ragged.values.dtype == np.dtype(dtype):
            return ragged
        return cls(cast_array(ragged.values, dtype, what, ragged.offsets), ragged.offsets)

    @classmethod
    def from_rows(
        cls, rows: Iterable[Any], dtype: npt.DTypeLike | None = None, what: str = "rows"
    ) -> Ragged:
        """From an iterable of rows, each a sequence of numbers, a 1-D array or a 1-D tensor.

        `dtype` defaults to that of the arrays among the rows, and where all rows are Python numbers
        to int32 for whole ones (int64 where one needs it) and float32 for others. Always copies
        (once)."""
        field = what.rpartition(".")[2]
        if isinstance(rows, (str, bytes)):
            raise InvalidRequestError(
                f"{what} must be token ids, not text; tokenise first (see Session.tokenizer)",
                field=field,
            )
        if not hasattr(rows, "__iter__") or getattr(rows, "ndim", 1) == 0:
            raise InvalidRequestError(
                f"{what} must be rows of numbers, not {type(rows).__name__}", field=field
            )
        arrays: list[Array] = []
        given: list[np.dtype[Any]] = []
        for index, row in enumerate(rows):
            array = _row(row, index, what)
            arrays.append(array)
            if array.size and hasattr(row, "dtype"):
                given.append(array.dtype)
        offsets = offsets_of(np.fromiter(map(len, arrays), np.int64, len(arrays)))
        filled = [array for array in arrays if array.size]
        values = np.concatenate(filled) if filled else np.empty(0, np.int32)
        if dtype is None:
            dtype = np.result_type(*given) if given else _own_dtype(values)
        return cls(cast_array(values, dtype, what, offsets), offsets)

    @classmethod
    def from_padded(cls, array: Any, mask: Any) -> Ragged:
        """From a dense [rows, width] numpy array or torch tensor and a mask of the same shape that
        is true where a value counts (padding on either side, or between)."""
        dense, keep = to_numpy(array), to_numpy(mask).astype(bool)
        if dense.ndim != 2 or dense.shape != keep.shape:
            raise InvalidRequestError(
                f"from_padded takes an array and a mask of one shape [rows, width], "
                f"not {dense.shape} and {keep.shape}"
            )
        if keep.all():
            return cls.of(dense)
        return cls(dense[keep], offsets_of(keep.sum(axis=1)))

    @classmethod
    def from_torch(cls, nested: Any) -> Ragged:
        """From a torch nested tensor (layout torch.jagged) of one value a token; shares memory."""
        if not getattr(nested, "is_nested", False):
            raise InvalidRequestError(
                "from_torch takes a nested (jagged) tensor; for a dense one use from_padded"
            )
        values, offsets = to_numpy(nested.values()), to_numpy(nested.offsets())
        lengths = nested.lengths() if hasattr(nested, "lengths") else None
        if lengths is not None:  # a jagged tensor with holes: rows start at offsets[i]
            counts = to_numpy(lengths)
            rows = [values[start : start + count] for start, count in zip(offsets, counts)]
            return cls.from_rows(rows, dtype=values.dtype)
        return cls(values, offsets)

    @classmethod
    def concat(cls, parts: Iterable[Ragged]) -> Ragged:
        """The rows of all parts, one after the other."""
        several = list(parts)
        if len(several) == 1:
            return several[0]
        if not several:
            raise InvalidRequestError("Ragged.concat needs at least one part")
        lengths = np.concatenate([part.lengths for part in several])
        values = np.concatenate([part.values for part in several])
        return cls(values, offsets_of(lengths))

    # -- reading ----------------------------------------------------------------------------

    @property
    def lengths(self) -> Array:
        """[rows], int64."""
        result: Array = np.diff(self.offsets)
        return result

    @property
    def dtype(self) -> np.dtype[Any]:
        """The values' dtype."""
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return int(self.values.nbytes + self.offsets.nbytes)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, key: int) -> Array: ...
    @overload
    def __getitem__(self, key: slice) -> Ragged: ...
    def __getitem__(self, key: int | slice) -> Array | Ragged:
        """Row `key` as a view; a slice of consecutive rows shares the values."""
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step != 1:
                return self.select(np.arange(start, stop, step))
            stop = max(start, stop)
            offsets = self.offsets[start : stop + 1]
            first, last = int(offsets[0]), int(offsets[-1])
            return Ragged(self.values[first:last], offsets if first == 0 else offsets - first)
        index = key + len(self) if key < 0 else key
        if not 0 <= index < len(self):
            raise IndexError(f"row {key} of a Ragged with {len(self)} rows")
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[Array]:
        return (self[index] for index in range(len(self)))

    def select(self, rows: Any) -> Ragged:
        """The rows at these indices (or where a boolean mask is true), in that order; copies."""
        indices = row_indices(rows, len(self))
        lengths = self.lengths[indices]
        offsets = offsets_of(lengths)
        starts = self.offsets[:-1][indices]
        positions = np.arange(int(offsets[-1]), dtype=np.int64)
        positions += np.repeat(starts - offsets[:-1], lengths)
        return Ragged(self.values[positions], offsets)

    def with_values(self, values: Any) -> Ragged:
        """Other values at the same rows."""
        return Ragged(values, self.offsets)

    def row_numbers(self) -> Array:
        """[total], int64: which row each value belongs to."""
        return np.repeat(np.arange(len(self), dtype=np.int64), self.lengths)

    # -- leaving ----------------------------------------------------------------------------

    def padding_mask(self, width: int | None = None, side: Side = "right") -> Array:
        """[rows, width] bool, true where a value stands; `side` is where the padding goes."""
        longest = int(self.lengths.max(initial=0))
        width = longest if width is None else width
        if width < longest:
            raise InvalidRequestError(f"width {width} is less than the longest row, {longest}")
        columns = np.arange(width)
        if side == "right":
            result: Array = columns[None, :] < self.lengths[:, None]
        elif side == "left":
            result = columns[None, :] >= width - self.lengths[:, None]
        else:
            raise InvalidRequestError(f"side must be 'left' or 'right', not {side!r}")
        return result

    def to_padded(self, fill: Any = 0, width: int | None = None, side: Side = "right") -> Array:
        """[rows, width], `fill` where no value stands; width defaults to the longest row."""
        mask = self.padding_mask(width, side)
        dense = np.full(mask.shape, fill, dtype=self.values.dtype)
        dense[mask] = self.values
        return dense

    def to_rows(self) -> list[list[Any]]:
        """Rows as lists of Python numbers."""
        return [row.tolist() for row in self]

    def to_torch(self) -> Any:
        """A torch nested tensor (layout torch.jagged) that shares the values; needs torch."""
        import torch

        lengths = self.lengths
        return torch.nested.nested_tensor_from_jagged(
            torch.from_numpy(_writable(self.values)),
            torch.from_numpy(_writable(self.offsets)),
            # without these, padding the tensor would take the number of all values as the width
            min_seqlen=int(lengths.min()) if len(self) else 0,
            max_seqlen=int(lengths.max(initial=0)),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ragged):
            return NotImplemented
        return np.array_equal(self.offsets, other.offsets) and np.array_equal(
            self.values, other.values
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Ragged({len(self)} rows, {len(self.values)} {self.dtype}, {brief(self.lengths)})"


def highest_id(ids: Ragged) -> int:
    """Of int32 values the largest, -1 where there are none, and some number from 2**31 on where one
    is negative: one pass for both bounds of an id. Those that can't be written to, as those of a
    received frame, are looked at once."""
    if ids._highest_id is not None and not ids.values.flags.writeable:
        return ids._highest_id
    highest = int(ids.values.view(np.uint32).max()) if ids.values.size else -1
    object.__setattr__(ids, "_highest_id", highest)
    return highest


def highest_id_seen(ids: Ragged) -> int:
    """`highest_id` as it last was, as of a batch that was made of them; an id that was written
    since is not seen."""
    return highest_id(ids) if ids._highest_id is None else ids._highest_id


def _row(row: Any, index: int, what: str) -> Array:
    if isinstance(row, (str, bytes)):
        problem = "is text, not token ids; tokenise first (see Session.tokenizer)"
    else:
        try:
            array = to_numpy(row)
        except InvalidRequestError:
            problem = "is not a flat sequence of numbers"
        else:
            if array.ndim == 1 and (array.size == 0 or array.dtype.kind in "biuf"):
                return array
            problem = (
                "must be a flat sequence of numbers, not a single one; give a list of rows, such "
                "as [[1, 2], [3]]"
                if array.ndim == 0 and array.dtype.kind in "biuf"
                else f"must be a flat sequence of numbers, not {array.dtype} of shape {array.shape}"
            )
    raise InvalidRequestError(
        f"row {index} of {what} {problem}", field=what.rpartition(".")[2], row=index
    )


def _own_dtype(values: Array) -> np.dtype[Any]:
    """What Python numbers are kept in."""
    if values.dtype.kind == "f":
        return np.dtype(np.float32)
    limits = np.iinfo(np.int32)
    narrow = values.dtype.kind == "i" and (
        values.size == 0 or (values.min() >= limits.min and values.max() <= limits.max)
    )
    return np.dtype(np.int32) if narrow else values.dtype


def _writable(array: Array) -> Array:
    # torch warns on read-only memory, and a caller who writes to such a view would write into a
    # received frame: those get a copy
    return array if array.flags.writeable else array.copy()
