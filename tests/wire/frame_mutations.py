"""Frames that began as good ones, changed in their bytes, in their JSON or in their arrays."""

from __future__ import annotations

import json
import struct
from typing import Any

from hypothesis import strategies as st
from wire_examples import EXAMPLES

from remote_rl.wire import ALIGNMENT, encode

BODIES = tuple(b"".join(encode(value).parts) for value in EXAMPLES)
DTYPES = ["|b1", "|u1", "|i1", "<u2", "<i2", "<f2", "<u4", "<i4", "<f4", "<u8", "<i8", "<f8"]
#: JSON texts that are no value of their place, whatever the place
ODD_TEXTS = [
    *("null", "true", '""', "[]", "{}", "-1", "0.5", "1e999", "-1e999", "1e-999", "NaN"),
    *("Infinity", "9" * 25, "9" * 5000, "-" + "9" * 400, "1.0", str(2**63), str(-(2**63) - 1)),
    *('"\\ud800"', '"\\u0000"', '"' + "x" * 5000 + '"', '"../x"', '"nan"'),
    *('{"#": 0}', '{"#": 1}', '{"#": 99999}', '{"#": -1}', '[{"#": 0}]', '{"#": 0, "#": 1}'),
    *(
        '{"@": "map", "of": {}}',
        '{"@": "map", "of": {"a": {"#": 0}}}',
        '{"@": "float", "is": "nan"}',
    ),
    *('{"@": "Ragged", "values": {"#": 0}, "offsets": {"#": 0}}', '{"@": "Batch"}'),
    *('{"@": "error", "error": "KeyError", "message": "x", "details": {"self": 1}}', '{"@": []}'),
    "[" * 200 + "]" * 200,
    "[" * 3000 + "]" * 3000,
    '{"@": "map", "of": {"a": ' * 900 + "1" + "}}" * 900,
]


def split(body: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and payload of a good frame."""
    (length,) = struct.unpack_from("<I", body, 4)
    return json.loads(body[8 : 8 + length]), body[-(-(8 + length) // ALIGNMENT) * ALIGNMENT :]


def assemble(header: bytes, payload: bytes) -> bytes:
    """A frame of this header's text and these bytes."""
    start = struct.pack("<4sI", b"RRL1", len(header)) + header
    return start + bytes(-len(start) % ALIGNMENT) + payload


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value of a JSON tree."""
    found = [path] if path else []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        if isinstance(value, (dict, list)):
            found += places(value, (*path, key))
        else:
            found.append((*path, key))
    return found


@st.composite
def changed_bytes(draw: st.DrawFn) -> bytes:
    """Bytes replaced, inserted, removed and repeated."""
    body = bytearray(draw(st.sampled_from(BODIES)))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(body)))
        until = min(len(body), at + draw(st.integers(0, 80)))
        kind = draw(st.sampled_from(["replace", "insert", "remove", "repeat", "length"]))
        if kind == "replace":
            body[at : at + 8] = draw(st.binary(min_size=1, max_size=8))
        elif kind == "insert":
            body[at:at] = draw(st.binary(max_size=70))
        elif kind == "remove":
            del body[at:until]
        elif kind == "repeat":
            body[at:at] = body[at:until]
        elif len(body) >= 8:
            body[4:8] = struct.pack("<I", draw(st.integers(0, 2**32 - 1)))
    return bytes(body)


@st.composite
def changed_json(draw: st.DrawFn, bodies: tuple[bytes, ...] = BODIES) -> bytes:
    """Values of the tree replaced by odd ones or by those of other frames, keys removed, renamed
    and doubled."""
    header, payload = split(draw(st.sampled_from(bodies)))
    marks: dict[str, str] = {}
    for number in range(draw(st.integers(1, 3))):
        ways = places(header)
        if not ways:
            break
        *way, last = draw(st.sampled_from(ways))
        holder: Any = header
        for key in way:
            holder = holder[key]
        kind = draw(st.sampled_from(["odd", "odd", "other", "remove", "rename", "double"]))
        if kind == "odd":
            mark = f"mark {number}"
            marks[json.dumps(mark)] = draw(st.sampled_from(ODD_TEXTS))
            holder[last] = mark
        elif kind == "other":
            holder[last] = split(draw(st.sampled_from(BODIES)))[0]["tree"]
        elif kind == "remove" or not isinstance(holder, dict):
            del holder[last]
        elif kind == "rename":
            holder[draw(st.sampled_from(["@", "#", "of", "values", "name", "self", ""]))] = (
                holder.pop(last)
            )
        else:
            holder[f"doubled {number}"] = draw(st.sampled_from([None, 1, "a", []]))
            marks[json.dumps(f"doubled {number}")] = json.dumps(last)
    text = json.dumps(header)
    for mark, odd in marks.items():
        text = text.replace(mark, odd)
    return assemble(text.encode(), payload)


@st.composite
def changed_arrays(draw: st.DrawFn) -> bytes:
    """Other dtypes, shapes, contents and orders of arrays, in frames whose sizes add up."""
    header, payload = split(draw(st.sampled_from([each for each in BODIES if split(each)[1]])))
    described = header["arrays"]
    data = bytearray(payload)
    for _ in range(draw(st.integers(1, 4))):
        index = draw(st.integers(0, len(described) - 1))
        dtype, shape = described[index]
        kind = draw(st.sampled_from(["dtype", "shape", "contents", "swap", "lie"]))
        if kind == "dtype":
            same = [each for each in DTYPES if each[2:] == dtype[2:]]
            described[index][0] = draw(st.sampled_from(same))
        elif kind == "shape":
            count = shape[0] if len(shape) == 1 else 1
            described[index][1] = draw(
                st.sampled_from([[count, 1], [1, count], [count, 1, 1], [0], [], [count]])
            )
        elif kind == "contents":
            at = draw(st.integers(0, len(data) - 1))
            width = int(dtype[2:])
            word = draw(st.sampled_from([b"\xff", b"\x00", b"\x7f", b"\x80", b"\x01"])) * width
            data[at : at + width] = word[: len(data[at : at + width])]
        elif kind == "swap":
            other = draw(st.integers(0, len(described) - 1))
            described[index], described[other] = described[other], described[index]
        else:
            described[index][1] = draw(st.lists(st.integers(-1, 2**62), max_size=4))
    return assemble(json.dumps(header).encode(), bytes(data))


@st.composite
def made_up(draw: st.DrawFn) -> bytes:
    """Frames that were never good ones."""
    json_text = st.sampled_from(ODD_TEXTS)
    tree, arrays = draw(json_text), draw(json_text)
    header = draw(
        st.sampled_from(
            [
                f'{{"tree": {tree}, "arrays": {arrays}}}',
                f'{{"tree": {tree}, "arrays": []}}',
                f'{{"tree": {tree}, "tree": {arrays}, "arrays": [["<i4", [16]]]}}',
                tree,
            ]
        )
    )
    return assemble(header.encode(), bytes(draw(st.sampled_from([0, 64, 128]))))


#: any of them, and noise
FRAMES = st.one_of(
    changed_bytes(), changed_json(), changed_arrays(), made_up(), st.binary(max_size=300)
)
