"""Wire: the frame, a small JSON header and raw array buffers (imports numpy and errors).

    offset  size  what
    0       4     magic "RRL1"
    4       4     header length H, unsigned little-endian
    8       H     header, UTF-8 JSON: {"tree": ..., "arrays": [[dtype, [shape...]], ...]}
    ...           zero bytes up to the next multiple of 64
    ...           each array's bytes, little-endian, C order, in the order of the header, each
                  followed by zero bytes up to the next multiple of 64

The header states no offset and no size that isn't implied by dtype and shape, so there is one way
to lie about an array, and it is caught by the length of what was received.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np

from ..errors import InvalidRequestError, ProtocolError
from ..types.arrays import Array

MAGIC = b"RRL1"
ALIGNMENT = 64
MAX_HEADER = 64 * 1024 * 1024
_PREFIX = struct.Struct("<4sI")
#: dtypes that may cross the wire
_DTYPES = {
    np.dtype(code).str: np.dtype(code)
    for code in ("|b1", "|u1", "|i1", "<u2", "<i2", "<f2", "<u4", "<i4", "<f4", "<u8", "<i8", "<f8")
}
_ZEROS = bytes(ALIGNMENT)


@attrs.frozen(eq=False)
class Frame:
    """A frame to send: `parts` in order (bytes and memoryviews, no copies), `nbytes` in all."""

    parts: tuple[bytes | memoryview, ...]
    nbytes: int

    def chunks(self, size: int) -> Iterator[bytes | memoryview]:
        """The parts, none longer than `size` bytes."""
        for part in self.parts:
            view = memoryview(part)
            for start in range(0, len(view), size):
                yield view[start : start + size]


def join(tree: Any, arrays: Sequence[Array]) -> Frame:
    """A frame of a JSON tree and the arrays it refers to by index."""
    described = []
    buffers: list[memoryview] = []
    for array in arrays:
        plain = np.ascontiguousarray(array)
        if plain.dtype.byteorder == ">":
            plain = plain.astype(plain.dtype.newbyteorder("<"))
        code = plain.dtype.str
        if code not in _DTYPES:
            raise InvalidRequestError(f"an array of dtype {plain.dtype} can't cross the wire")
        described.append([code, list(array.shape)])
        buffers.append(plain.reshape(-1).view(np.uint8).data)
    header = json.dumps(
        {"tree": tree, "arrays": described}, allow_nan=False, separators=(",", ":")
    ).encode()
    if len(header) > MAX_HEADER:
        raise InvalidRequestError(
            f"what is to be sent has {len(header)} bytes beside its arrays, more than the "
            f"{MAX_HEADER} that fit; send it in pieces, and numbers as arrays"
        )
    start = _PREFIX.pack(MAGIC, len(header)) + header
    parts: list[bytes | memoryview] = [start + _ZEROS[: -len(start) % ALIGNMENT]]
    for buffer in buffers:
        if len(buffer):
            parts.append(buffer)
            if len(buffer) % ALIGNMENT:
                parts.append(_ZEROS[: -len(buffer) % ALIGNMENT])
    return Frame(tuple(parts), sum(len(part) for part in parts))


def parse(data: bytes | bytearray | memoryview) -> tuple[Any, list[Array]]:
    """Tree and arrays of a received frame; the arrays are read-only views into `data`.

    Raises `ProtocolError` where anything doesn't fit; allocates nothing of a claimed size.
    """
    view = memoryview(data).cast("B")
    header, start = _header(view)
    described = header.get("arrays")
    if not isinstance(described, list) or "tree" not in header:
        raise ProtocolError("the frame's header lacks its tree or its list of arrays")
    arrays = []
    for index, description in enumerate(described):
        dtype, shape, nbytes = _description(index, description, len(view))
        if start + nbytes > len(view):
            raise ProtocolError(
                f"array {index} of the frame claims {nbytes} bytes, but only "
                f"{max(0, len(view) - start)} are left"
            )
        array = np.frombuffer(view[start : start + nbytes], dtype).reshape(shape)
        array.flags.writeable = False
        arrays.append(array)
        start += nbytes + -nbytes % ALIGNMENT
    if start != len(view):
        raise ProtocolError(
            f"the frame has {len(view)} bytes where its header accounts for {start}"
        )
    return header["tree"], arrays


def _header(view: memoryview) -> tuple[dict[str, Any], int]:
    if len(view) < _PREFIX.size:
        raise ProtocolError(f"a frame has at least {_PREFIX.size} bytes, not {len(view)}")
    magic, length = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise ProtocolError(
            "the bytes don't begin as a frame does; is the other side a remote_rl server?"
        )
    end = _PREFIX.size + length
    if length > MAX_HEADER or end > len(view):
        raise ProtocolError(f"the frame claims a header of {length} bytes and has {len(view)}")
    try:
        header = json.loads(bytes(view[_PREFIX.size : end]), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the frame's header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise ProtocolError("the frame's header is not a JSON object")
    return header, end + -end % ALIGNMENT


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _description(
    index: int, description: Any, received: int
) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    # no dimension exceeds the bytes received: an empty array of shape [2**40, 0] would cost nothing
    # here and terabytes of offsets later
    good = (
        isinstance(description, list)
        and len(description) == 2
        and isinstance(description[0], str)
        and description[0] in _DTYPES
        and isinstance(description[1], list)
        and len(description[1]) <= 16
        and all(type(size) is int and 0 <= size <= received for size in description[1])
    )
    if not good:
        raise ProtocolError(f"array {index} of the frame has no valid dtype and shape")
    dtype, shape = _DTYPES[description[0]], tuple(description[1])
    return dtype, shape, math.prod(shape) * dtype.itemsize
