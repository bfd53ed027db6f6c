"""A frame whose arrays are carried apart is the same object, in the memory that was received."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from wire_examples import BATCH, EXAMPLES, assert_same

from remote_rl.errors import ProtocolError
from remote_rl.transports.parcels import INLINE_BYTES, pack, parcel_bytes, unpack
from remote_rl.types import Ragged
from remote_rl.wire import decode, decode_apart, encode

LARGE = Ragged.from_rows([np.arange(20_000), [], [7]], np.int32)


def apart(value: Any) -> tuple[bytes, list[memoryview]]:
    frame = encode(value)
    return frame.opening, list(frame.buffers)


@pytest.mark.parametrize("value", EXAMPLES, ids=lambda value: type(value).__name__)
def test_every_class_comes_out_as_from_a_whole_frame(value: Any) -> None:
    whole = decode(b"".join(encode(value).parts))
    assert_same(decode_apart(*apart(value)), whole)
    assert_same(unpack(pack(encode(value))), whole)


def test_the_arrays_are_views_that_nobody_can_write_to() -> None:
    opening, buffers = apart(LARGE)
    received = [bytearray(each) for each in buffers]
    found = decode_apart(opening, map(memoryview, received))
    assert np.shares_memory(found.values, np.frombuffer(received[0], np.int32))
    assert not found.values.flags.writeable
    assert found == LARGE


def test_a_large_frame_is_packed_without_a_copy_and_a_small_one_as_bytes() -> None:
    small, large = pack(encode(BATCH)), pack(encode(LARGE))
    assert isinstance(small, bytes)
    assert len(small) == parcel_bytes(small) <= INLINE_BYTES
    opening, buffers = large
    assert isinstance(opening, bytes)
    first = np.frombuffer(memoryview(buffers[0]), np.int32)
    assert np.shares_memory(first, LARGE.values)
    assert parcel_bytes(large) == len(opening) + LARGE.nbytes


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda buffers: buffers[:-1], "its buffer has 0"),
        (lambda buffers: [*buffers, memoryview(b"more")], "3 buffers where its header accounts"),
        (lambda buffers: buffers[::-1], "its buffer has 32"),
        (lambda buffers: [buffers[0][:-4], buffers[1]], "its buffer has 80000"),
        (lambda buffers: [], "no valid dtype and shape"),
    ],
)
def test_buffers_that_the_header_does_not_describe_are_refused(change: Any, said: str) -> None:
    opening, buffers = apart(LARGE)
    with pytest.raises(ProtocolError, match=said):
        decode_apart(opening, change(buffers))


@pytest.mark.parametrize("opening", [b"", b"RRL1", b"garbage garbage", b"RRL1\xff\xff\x00\x00{}"])
def test_what_is_no_opening_is_refused(opening: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_apart(opening, [])
