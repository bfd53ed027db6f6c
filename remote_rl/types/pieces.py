"""Contract: tensors in pieces, for a push that is too large for one message (imports numpy, attrs,
errors, arrays, fields, results)."""

from __future__ import annotations

import math
from typing import Any

import attrs
import numpy as np

from ..errors import InvalidRequestError
from .arrays import Array, to_numpy
from .fields import SEMANTIC, as_tuple, each, integer, one_of, plain, strict
from .results import TENSOR_DTYPES, Tensor


@strict
@attrs.frozen(kw_only=True)
class TensorForm:
    """What a tensor is, without its contents: shape, and dtype, a tag of TENSOR_DTYPES."""

    shape: tuple[int, ...] = attrs.field(
        metadata=SEMANTIC, converter=as_tuple, validator=each(integer(minimum=0))
    )
    dtype: str = attrs.field(metadata=SEMANTIC, validator=one_of(TENSOR_DTYPES))

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        """That of a tensor."""
        return cls(shape=tensor.shape, dtype=tensor.dtype)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return np.dtype(TENSOR_DTYPES[self.dtype]).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.itemsize


def _contiguous(value: Any) -> Array:
    return np.ascontiguousarray(to_numpy(value, "Piece.data"))


def _bytes(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not (value.dtype == np.uint8 and value.ndim == 1 and value.size):
        raise InvalidRequestError(
            f"Piece.data must be a one-dimensional array of uint8 with at least one byte, not "
            f"{list(value.shape)} of {value.dtype}",
            field=attribute.name,
        )


@strict
@attrs.frozen(kw_only=True, eq=False, repr=False)
class Piece:
    """A stretch of one tensor's bytes, little-endian and in C order; it holds whole elements.

    offset: the byte of the tensor at which it begins. data: [bytes] uint8.
    """

    offset: int = attrs.field(metadata=SEMANTIC, converter=plain, validator=integer(minimum=0))
    data: Array = attrs.field(metadata=SEMANTIC, converter=_contiguous, validator=_bytes)

    @property
    def end(self) -> int:
        """The byte after its last one."""
        return self.offset + int(self.data.size)

    def __repr__(self) -> str:
        return f"Piece({self.offset}, {self.data.size} bytes)"
