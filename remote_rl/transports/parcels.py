"""Transport: how a frame becomes the argument or the answer of a Ray call, on both sides (imports
wire).

A small one is bytes, which travel inside the call. A large one keeps its arrays apart, each out of
band, so that Ray writes them once into the node's object store, and the receiver's arrays are views
into it.
"""

from __future__ import annotations

from pickle import PickleBuffer
from typing import Any, TypeAlias

from ..wire import Frame, decode, decode_apart

#: a frame up to this size goes inside the call; Ray itself would take 100 KB
INLINE_BYTES = 64 << 10

#: a frame's bytes, or those before its arrays, and the memory of these
Parcel: TypeAlias = "bytes | tuple[bytes, list[Any]]"


def pack(frame: Frame) -> Parcel:
    """What a call carries; nothing of a large frame's arrays is copied."""
    if frame.nbytes <= INLINE_BYTES:
        return b"".join(frame.parts)
    return frame.opening, [PickleBuffer(each) for each in frame.buffers]


def unpack(parcel: Parcel) -> Any:
    """The object; its arrays are read-only views into the memory that was received."""
    if isinstance(parcel, bytes):
        return decode(parcel)
    opening, buffers = parcel
    return decode_apart(opening, map(memoryview, buffers))


def parcel_bytes(parcel: Parcel) -> int:
    """How large it is."""
    if isinstance(parcel, bytes):
        return len(parcel)
    opening, buffers = parcel
    return len(opening) + sum(memoryview(each).nbytes for each in buffers)
