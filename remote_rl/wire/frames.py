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
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import attrs
import numpy as np

from ..errors import InvalidRequestError, ProtocolError
from ..types.arrays import Array

MAGIC = b"RRL1"
ALIGNMENT = 64
MAX_HEADER = 16 * 1024 * 1024
#: lists and objects of JSON within each other, in a tree: whoever takes one can pass it on, since
#: neither side's recursion comes near its end
MAX_DEPTH = 128
_PREFIX = struct.Struct("<4sI")
#: dtypes that may cross the wire
_DTYPES = {
    np.dtype(code).str: np.dtype(code)
    for code in ("|b1", "|u1", "|i1", "<u2", "<i2", "<f2", "<u4", "<i4", "<f4", "<u8", "<i8", "<f8")
}
_ZEROS = bytes(ALIGNMENT)
_NOTHING = memoryview(b"")
#: parts up to this size are sent together, up to so many bytes at once
_SHORT, _TOGETHER = 16 << 10, 64 << 10


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


JSON = json.JSONEncoder(allow_nan=False, check_circular=False, separators=(",", ":"))
_HEADER = json.JSONDecoder(parse_constant=_no_constant)


class Tail(Protocol):
    """The frame's last array, which depends on the bytes of those before it."""

    def begin(self) -> Any:
        """A state, whose `update` takes them in."""

    def end(self, state: Any) -> bytes:
        """The array's bytes, after all of them."""


@attrs.frozen(eq=False)
class Frame:
    """A frame to send, `nbytes` in all: its header, and its arrays without a copy. `tail`: an array
    after these."""

    _parts: tuple[bytes | memoryview, ...]
    nbytes: int
    _tail: Tail | None = None

    @property
    def parts(self) -> tuple[bytes | memoryview, ...]:
        """Its bytes in order."""
        return self._parts if self._tail is None else tuple(self.chunks(self.nbytes))

    @property
    def opening(self) -> bytes:
        """Its bytes up to the first array."""
        return bytes(self._parts[0])

    @property
    def buffers(self) -> tuple[memoryview, ...]:
        """The memory of its arrays, those without a byte left out; only of a frame without a
        tail."""
        return tuple(part for part in self._parts[1:] if isinstance(part, memoryview))

    def chunks(self, size: int) -> Iterator[bytes | memoryview]:
        """The bytes in pieces of at most `size`: long parts uncopied, short neighbours together.
        What the tail has to know of each piece it takes in only when the next one is wanted, while
        the network is still busy with this one."""
        state = None if self._tail is None else self._tail.begin()
        header, room = self._parts[0], min(_TOGETHER, size)
        short: list[bytes | memoryview] = []  # they wait for each other
        waiting = 0
        for part in self._parts:
            if len(part) <= min(_SHORT, room):
                if waiting + len(part) > room:
                    yield b"".join(short)
                    short, waiting = [], 0
                short.append(part)
                waiting += len(part)
                if state is not None and part is not header:
                    state.update(part)
                continue
            if short:
                yield b"".join(short)
                short, waiting = [], 0
            view = memoryview(part)
            for start in range(0, len(view), size):
                piece = view[start : start + size]
                yield piece
                if state is not None and part is not header:
                    state.update(piece)
        if self._tail is not None:
            last = self._tail.end(state)
            short.append(last + _ZEROS[: -len(last) % ALIGNMENT])
        if short:
            yield b"".join(short)


@attrs.frozen(eq=False)
class Buffers:
    """Arrays as they lie in a frame: `described` for its header, and `parts`, padding included."""

    described: tuple[Any, ...]
    parts: tuple[bytes | memoryview, ...]

    @classmethod
    def of(cls, arrays: Iterable[Array]) -> Buffers:
        """Refers to the arrays' memory; what isn't contiguous or little-endian is copied."""
        described: list[Any] = []
        parts: list[bytes | memoryview] = []
        for array in arrays:
            plain = np.ascontiguousarray(array)
            if plain.dtype.byteorder == ">":
                plain = plain.astype(plain.dtype.newbyteorder("<"))
            code = plain.dtype.str
            if code not in _DTYPES:
                raise InvalidRequestError(f"an array of dtype {plain.dtype} can't cross the wire")
            described.append([code, list(array.shape)])
            if plain.nbytes:
                parts.append(plain.reshape(-1).view(np.uint8).data)
                if plain.nbytes % ALIGNMENT:
                    parts.append(_ZEROS[: -plain.nbytes % ALIGNMENT])
        return cls(tuple(described), tuple(parts))


NO_BUFFERS = Buffers((), ())


def join(tree: str, buffers: Buffers, tail: Tail | None = None, tail_bytes: int = 0) -> Frame:
    """A frame of a tree's JSON and the arrays it refers to; `tail` is one more, of bytes."""
    described = buffers.described
    if not described and tail is None:
        whole = head(tree, ())
        return Frame((whole,), len(whole))
    if tail is not None:
        described = (*described, ["|u1", [tail_bytes]])
    parts = (head(tree, described), *buffers.parts)
    nbytes = sum(map(len, parts)) + tail_bytes + -tail_bytes % ALIGNMENT
    return Frame(parts, nbytes, tail)


def head(tree: str, described: tuple[Any, ...]) -> bytes:
    """A frame's bytes up to its first array."""
    arrays = JSON.encode(described) if described else "[]"
    header = f'{{"tree":{tree},"arrays":{arrays}}}'.encode()
    if len(header) > MAX_HEADER:
        raise InvalidRequestError(
            f"what is to be sent has {len(header)} bytes beside its arrays, more than the "
            f"{MAX_HEADER} that fit; send it in pieces, and numbers as arrays"
        )
    start = _PREFIX.pack(MAGIC, len(header)) + header
    return start + _ZEROS[: -len(start) % ALIGNMENT]


def parse(data: bytes | bytearray | memoryview) -> tuple[Any, list[Array]]:
    """Tree and arrays of a received frame; the arrays are read-only views into `data`.

    Raises `ProtocolError` where anything doesn't fit; allocates nothing of a claimed size.
    """
    view = memoryview(data).cast("B").toreadonly()
    header, start = _header(view)
    arrays = []
    for index, description in enumerate(_described(header)):
        dtype, shape, nbytes = _description(index, description, len(view))
        if start + nbytes > len(view):
            raise ProtocolError(
                f"array {index} of the frame claims {nbytes} bytes, but only "
                f"{max(0, len(view) - start)} are left"
            )
        array = np.frombuffer(view, dtype, nbytes // dtype.itemsize, start if nbytes else 0)
        arrays.append(array if len(shape) == 1 else array.reshape(shape))
        start += nbytes + -nbytes % ALIGNMENT
    if start != len(view):
        raise ProtocolError(
            f"the frame has {len(view)} bytes where its header accounts for {start}"
        )
    return header["tree"], arrays


def parse_apart(
    opening: bytes | memoryview, buffers: Iterable[memoryview]
) -> tuple[Any, list[Array]]:
    """As `parse`, of a frame whose bytes up to the first array are `opening`, and whose arrays lie
    in `buffers`, those without a byte left out; the arrays are read-only views into these."""
    header, _ = _header(memoryview(opening))
    waiting = [memoryview(each).cast("B") for each in buffers]
    received, count = len(opening) + sum(map(len, waiting)), len(waiting)
    waiting.reverse()
    arrays = []
    for index, description in enumerate(_described(header)):
        dtype, shape, nbytes = _description(index, description, received)
        buffer = waiting.pop() if nbytes and waiting else _NOTHING
        if len(buffer) != nbytes:
            raise ProtocolError(
                f"array {index} of the frame claims {nbytes} bytes, its buffer has {len(buffer)}"
            )
        array = np.frombuffer(buffer, dtype).reshape(shape)
        array.flags.writeable = False
        arrays.append(array)
    if waiting:
        raise ProtocolError(
            f"the frame has {count} buffers where its header accounts for {count - len(waiting)}"
        )
    return header["tree"], arrays


def header_bytes(data: bytes | bytearray | memoryview) -> int:
    """How long the header of a received frame says it is; 0 of what is too short to be one."""
    return int(_PREFIX.unpack_from(data)[1]) if len(data) >= _PREFIX.size else 0


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
        text = str(view[_PREFIX.size : end], "utf-8").strip(" \t\r\n")
        header, length = _HEADER.raw_decode(text)
        if length != len(text):
            raise ValueError(f"something follows it, at character {length}")
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the frame's header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise ProtocolError("the frame's header is not a JSON object")
    # most have fewer brackets than that, let alone within each other
    many = len(text) > 2 * MAX_DEPTH and text.count("[") + text.count("{") > MAX_DEPTH
    if many and _is_deeper(header.get("tree"), MAX_DEPTH):
        raise ProtocolError(f"the frame's tree is nested more than {MAX_DEPTH} deep")
    return header, end + -end % ALIGNMENT


def _is_deeper(tree: Any, levels: int) -> bool:
    """Whether JSON's lists and objects lie within each other in more levels than that."""
    level = [tree]
    for _ in range(levels):
        level = [
            item
            for each in level
            if isinstance(each, (list, dict))
            for item in (each.values() if isinstance(each, dict) else each)
        ]
    return any(isinstance(each, (list, dict)) for each in level)


def _described(header: dict[str, Any]) -> list[Any]:
    described = header.get("arrays")
    if not isinstance(described, list) or "tree" not in header:
        raise ProtocolError("the frame's header lacks its tree or its list of arrays")
    return described


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
