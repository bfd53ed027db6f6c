"""What lies, ends early or is no frame at all is a ProtocolError, and costs no memory."""

from __future__ import annotations

import json
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from wire_examples import BATCH, EXAMPLES

from remote_rl.errors import InvalidRequestError, ProtocolError, RemoteRLError
from remote_rl.wire import ALIGNMENT, decode, encode, parse

WHOLE = b"".join(encode(BATCH).parts)


def frame(header: Any, payload: bytes = b"") -> bytes:
    """A frame with this header, whatever it says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    start = struct.pack("<4sI", b"RRL1", len(text)) + text
    return start + bytes(-len(start) % ALIGNMENT) + payload


def tree(value: Any, arrays: Any = (), payload: bytes = b"") -> bytes:
    return frame({"tree": value, "arrays": list(arrays)}, payload)


def test_the_layout_is_the_documented_one() -> None:
    array = np.arange(3, dtype=np.int32)
    body = b"".join(encode({"a": array, "b": [1, None, float("inf")]}).parts)
    magic, length = struct.unpack_from("<4sI", body)
    header = json.loads(body[8 : 8 + length])
    assert magic == b"RRL1"
    assert header == {
        "tree": {"@": "map", "of": {"a": {"#": 0}, "b": [1, None, {"@": "float", "is": "inf"}]}},
        "arrays": [["<i4", [3]]],
    }
    first = -(-(8 + length) // ALIGNMENT) * ALIGNMENT
    assert body[8 + length : first].strip(b"\0") == b""
    assert body[first:] == array.tobytes() + bytes(ALIGNMENT - 12)


def test_every_truncation_is_refused() -> None:
    for length in range(len(WHOLE)):
        with pytest.raises(ProtocolError):
            decode(WHOLE[:length])


def test_trailing_bytes_are_refused() -> None:
    with pytest.raises(ProtocolError, match="accounts for"):
        decode(WHOLE + bytes(ALIGNMENT))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"<html><body>502 Bad Gateway</body></html>" * 10,
        b"RRL2" + WHOLE[4:],
        frame(b"not json"),
        frame(b"\xff\xfe"),
        frame(b"[" * 100_000),
        frame(b'{"tree": ' + b"[" * 500 + b"]" * 500 + b', "arrays": []}'),
        frame([]),
        frame({"tree": 1}),
        frame({"arrays": []}),
        frame({"tree": 1, "arrays": {}}),
        frame(b'{"tree": NaN, "arrays": []}'),
        frame(b'{"tree": ' + b"1" * 5000 + b', "arrays": []}'),
    ],
)
def test_no_frame_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(body)


@pytest.mark.parametrize(
    "description",
    [
        ["<f4", [2**46]],
        ["<f4", [2**16, 2**16, 2**16]],
        ["<f4", [2**47, 0]],
        ["<f4", [0, 2**47, 2**47]],
        ["<f4", [-1]],
        ["<f4", [True]],
        ["<f4", [1.0]],
        ["<f4", ["1"]],
        ["<f4", 1],
        ["<f4", [1] * 17],
        ["<f4"],
        ["<f4", [1], 1],
        ["|O", [1]],
        ["|V4", [1]],
        ["<U4", [1]],
        [">f4", [1]],
        ["<M8[s]", [1]],
        [None, [1]],
        {"dtype": "<f4"},
        "<f4",
        None,
    ],
)
def test_an_array_that_lies_is_refused_and_costs_nothing(description: Any) -> None:
    body = tree({"#": 0}, [description], bytes(ALIGNMENT))
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_an_empty_array_does_not_become_terabytes_of_offsets() -> None:
    ragged = {
        "@": "Generate",
        "prompts": {"#": 0},
        "params": {"@": "SamplingParams", "max_tokens": 1},
    }
    with pytest.raises(ProtocolError):
        decode(tree(ragged, [["<i4", [2**40, 0]]]))


def test_a_list_does_not_multiply_an_array() -> None:
    rows = [{"#": 0}] * 1000
    with pytest.raises(ProtocolError, match="list"):
        decode(tree(rows, [["<i4", [16]]], bytes(ALIGNMENT)))


@pytest.mark.parametrize(
    "value",
    [
        {"#": 1},
        {"#": -1},
        {"#": True},
        {"#": "0"},
        {"#": None},
        {"@": "map"},
        {"@": "map", "of": []},
        {"@": "float", "is": "1e9"},
        {"@": "float"},
        {"@": "error"},
        {"@": "error", "error": "BackendError", "message": 1},
        {"@": "error", "error": "BackendError", "message": "x", "details": []},
        {"@": "error", "error": "BackendError", "message": "x", "details": {}, "cause": 3},
        {"@": "object"},
        {"@": "Message"},
        {"@": "Request"},
        {"@": "Loss"},
        {"@": "FormulaLoss"},
        {"@": "LossBatch"},
        {"@": "RemoteRLError"},
        {"@": ["Batch"]},
        {"@": None},
        {},
        {"@": "Ragged", "values": 1, "offsets": 2},
        {"@": "Ragged", "values": {"#": 0}, "offsets": None},
        {"@": "Done", "version": {"@": "map", "of": {}}},
        {"@": "Wait", "client_id": "c", "instance_id": "i", "timeout": 1, "acknowledged": [3]},
    ],
)
def test_a_tree_that_makes_no_sense_is_refused(value: Any) -> None:
    with pytest.raises((ProtocolError, InvalidRequestError)):
        decode(tree(value, [["<i4", [16]]], bytes(ALIGNMENT)))


def test_an_unknown_class_is_named() -> None:
    with pytest.raises(ProtocolError, match="'Popen'"):
        decode(tree({"@": "Popen", "args": ["true"]}))


def test_an_unknown_field_gets_the_nearest_one() -> None:
    with pytest.raises(InvalidRequestError, match="weight_decay"):
        decode(tree({"@": "AdamW", "lr": 1.0, "weight_decai": 0.1}))


def test_what_arrives_is_validated_as_what_is_made() -> None:
    with pytest.raises(InvalidRequestError, match="lr"):
        decode(tree({"@": "AdamW", "lr": -1.0}))


def test_an_error_of_a_class_unknown_here_is_a_backend_error() -> None:
    body = {"@": "error", "error": "NewError", "message": "x", "details": {}, "cause": None}
    assert type(decode(tree(body))).__name__ == "BackendError"


def test_arrays_at_an_odd_address_are_read_all_the_same() -> None:
    shifted = memoryview(b"x" + WHOLE)[1:]
    assert decode(shifted) == decode(WHOLE)


def _header_of(value: Any) -> bytes:
    body = b"".join(encode(value).parts)
    (length,) = struct.unpack_from("<I", body, 4)
    return body[8 : 8 + length]


@given(st.binary(max_size=300))
@example(b"RRL1\xff\xff\xff\xff")
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(noise)


@given(st.sampled_from(EXAMPLES), st.data())
def test_a_flipped_byte_gives_an_object_or_an_error_of_the_tree(
    value: Any, data: st.DataObject
) -> None:
    body = bytearray(b"".join(encode(value).parts))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(body))
    except RemoteRLError:
        pass


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["#", "@", "of", "is", "values", "name"]), inner, max_size=3
        )
    ),
    max_leaves=10,
)
FIELDS = sorted(
    {name for value in EXAMPLES for name in json.loads(_header_of(value))["tree"] if name != "@"}
)


@given(
    st.sampled_from(EXAMPLES),
    st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1, max_size=2),
)
def test_fields_of_any_json_give_an_object_or_an_error_of_the_tree(
    value: Any, replaced: dict[str, Any]
) -> None:
    header = json.loads(_header_of(value))
    body = b"".join(encode(value).parts)
    (length,) = struct.unpack_from("<I", body, 4)
    payload = body[-(-(8 + length) // ALIGNMENT) * ALIGNMENT :]
    known = {name: item for name, item in replaced.items() if name in header["tree"]}
    try:
        decode(tree({**header["tree"], **(known or replaced)}, header["arrays"], payload))
    except RemoteRLError:
        pass


def test_parse_gives_the_tree_and_read_only_views() -> None:
    _, arrays = parse(WHOLE)
    assert arrays
    assert not any(array.flags.writeable or array.flags.owndata for array in arrays)
