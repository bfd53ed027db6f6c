"""Wire: typed objects to JSON with array references, and back (imports the contract).

    JSON value                      stands for
    null, true, 1, 0.5, "text"      themselves
    [...]                           a tuple, list or set
    {"#": 3}                        array 3 of the frame
    {"@": "map", "of": {...}}       a mapping with string keys
    {"@": "float", "is": "nan"}     nan, inf, -inf
    {"@": "error", ...}             an error of `remote_rl.errors`
    {"@": "Batch", ...}             an object of the named class, field by field

Only classes of the fixed list are built, each by its own constructor, so that what arrives is
validated exactly as what is made locally. Fields of kind LOCAL are not sent.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import numpy as np

from ..errors import InvalidRequestError, ProtocolError, RemoteRLError
from ..messages import Submit
from ..submits import submit_of
from ..types.arrays import Array
from ..types.fields import KIND
from .digests import DIGEST_BYTES, RequestDigest
from .frames import JSON, MAX_DEPTH, NO_BUFFERS, Buffers, Frame, join, parse, parse_apart
from .vocabulary import wire_classes

_READ_AS_THEY_ARE = frozenset({str, int, bool, float, type(None)})
#: a request of at least this size is hashed while it is sent, a smaller one before
LATE_BYTES = 1 << 18
#: levels that a request leaves to what carries it, and to the answers that repeat a part of it
_ROOM = 16


def encode(value: Any) -> Frame:
    """`value`, an object of the contract, as a frame; arrays are referred to, not copied."""
    if isinstance(value, Submit) and isinstance(value.digest, RequestDigest):
        return _encode_submit(value, value.digest)
    arrays: list[Array] = []
    text = _Encoder(arrays).text(value)
    return join(text, Buffers.of(arrays) if arrays else NO_BUFFERS)


def _encode_submit(submit: Submit, digest: RequestDigest) -> Frame:
    """The request is encoded already; of a large one the digest follows its bytes.

    Written out, since every operation goes through here: that these are its fields, and the JSON
    the general way's, a test holds.
    """
    late = digest.taken is None and digest.nbytes >= LATE_BYTES
    last = f'{{"#":{len(digest.buffers.described)}}}' if late else f'"{digest.text()}"'
    keys = ",".join(
        [f"[{_string(stream)},{int(number)}]" for stream, number in submit.acknowledged]
    )
    deadline = "null" if submit.deadline is None else repr(float(submit.deadline))
    text = (
        f'{{"@":"Submit","client_id":{_string(submit.client_id)},'
        f'"instance_id":{_string(submit.instance_id)},"acknowledged":[{keys}],'
        f'"operation":{_string(submit.operation)},"number":{int(submit.number)},'
        f'"request":{digest.request},"digest":{last},'
        f'"generates_before":{int(submit.generates_before)},"deadline":{deadline},'
        f'"linger":{float(submit.linger)!r},"patience":{float(submit.patience)!r}}}'
    )
    if not late:
        return join(text, digest.buffers)
    return join(text, digest.buffers, tail=digest, tail_bytes=DIGEST_BYTES)


def decode(data: bytes | bytearray | memoryview) -> Any:
    """The object of a received frame; its arrays are read-only views into `data`.

    Raises `ProtocolError` for what no client of this protocol would send and the constructor's
    own error (`InvalidRequestError`) for an object that says what it must not.
    """
    tree, arrays = parse(data)
    return _Decoder(arrays).value(tree)


def decode_apart(opening: bytes | memoryview, buffers: Iterable[memoryview]) -> Any:
    """As `decode`, of a frame that came apart: its arrays are views into `buffers`."""
    tree, arrays = parse_apart(opening, buffers)
    return _Decoder(arrays).value(tree)


def seal(request: Any) -> RequestDigest:
    """The request's digest, for its Submit; the request is encoded once for all of its sendings.

    Raises `InvalidRequestError` where it can't cross the wire.
    """
    arrays: list[Array] = []
    return RequestDigest(_Encoder(arrays, _ROOM).text(request), arrays)


def digest(value: Any) -> str:
    """32 hex digits that differ where two requests differ: xxh3-128 over the frame's bytes.

    It tells accidents apart (a number used again for other contents), not forgeries; whoever may
    forge it holds the run's token and could send anything anyway.
    """
    return seal(value).text()


class _Encoder:
    """Writes JSON at once, without a tree in between: most messages are small, and of their time
    the way through two forms was the larger part."""

    def __init__(self, arrays: list[Array], depth: int = 0) -> None:
        self.arrays = arrays
        self._index: dict[int, int] = {}
        self._depth = depth

    def text(self, value: Any) -> str:
        kind = type(value)
        write = _WRITERS.get(kind)
        if write is not None:
            return write(value)
        if kind is tuple or kind is list:
            return self._list(value)
        layout = _layouts().get(kind)
        return self._rarer(value) if layout is None else self._object(value, *layout)

    def _object(self, value: Any, opening: str, fields: Iterable[tuple[str, str]]) -> str:
        self._deeper(1)
        parts = [opening]
        for key, name in fields:
            item = getattr(value, name)
            write = _WRITERS.get(type(item))
            parts += (key, self.text(item) if write is None else write(item))
        parts.append("}")
        self._depth -= 1
        return "".join(parts)

    def _rarer(self, value: Any) -> str:
        for kinds, write in _SUBCLASSES:
            if isinstance(value, kinds):
                return write(value)
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, (bytes, bytearray, memoryview)):
            return self._array(np.frombuffer(value, np.uint8))
        if isinstance(value, Mapping):
            self._deeper(2)
            texts = {str(key): self.text(item) for key, item in value.items()}
            self._depth -= 2
            items = [f"{_string(key)}:{text}" for key, text in texts.items()]
            return f'{{"@":"map","of":{{{",".join(items)}}}}}'
        if isinstance(value, (set, frozenset)):
            value = sorted(value)
        if isinstance(value, (tuple, list)):
            return self._list(value)
        if isinstance(value, RemoteRLError):
            return JSON.encode({"@": "error", **value.to_wire()})
        raise InvalidRequestError(
            f"a {type(value).__module__}.{type(value).__name__} can't cross the wire; "
            "pass plain values, arrays or the classes of remote_rl"
        )

    def _list(self, value: Iterable[Any]) -> str:
        self._deeper(1)
        items = ",".join([self.text(item) for item in value])
        self._depth -= 1
        return f"[{items}]"

    def _deeper(self, levels: int) -> None:
        """Into so many of JSON's levels. An encoder that has raised isn't used again."""
        self._depth += levels
        if self._depth > MAX_DEPTH:
            raise InvalidRequestError(
                f"values that are nested in {MAX_DEPTH} lists and mappings can't cross the wire (a "
                "mapping counts twice); flatten them"
            )

    def _array(self, array: Array) -> str:
        # one array referred to from several fields (a batch's offsets) crosses once
        index = self._index.get(id(array))
        if index is None:
            index = self._index[id(array)] = len(self.arrays)
            self.arrays.append(array)
        return f'{{"#":{index}}}'


def _float(value: Any) -> str:
    number = float(value)
    return repr(number) if math.isfinite(number) else f'{{"@":"float","is":"{number}"}}'


def _int(value: Any) -> str:
    return repr(int(value))


_string: Callable[[str], str] = json.encoder.encode_basestring_ascii
_WRITERS: Mapping[type, Callable[[Any], str]] = {
    str: _string,
    int: int.__repr__,
    float: _float,
    bool: {True: "true", False: "false"}.__getitem__,
    type(None): {None: "null"}.__getitem__,
}
#: numpy's, and what is derived
_SUBCLASSES: tuple[tuple[tuple[type, ...], Callable[[Any], str]], ...] = (
    ((str,), _string),
    ((int, np.integer), _int),
    ((float, np.floating), _float),
)


class _Decoder:
    def __init__(self, arrays: list[Array]) -> None:
        self.arrays = arrays

    def value(self, tree: Any) -> Any:
        if type(tree) is list:
            if _READ_AS_THEY_ARE.issuperset(map(type, tree)):
                return tuple(tree)
            return tuple(
                [item if type(item) in _READ_AS_THEY_ARE else self._item(item) for item in tree]
            )
        if type(tree) is not dict:
            return tree
        if "#" in tree:
            return self._array(tree["#"])
        kind = tree.get("@")
        wire_class = wire_classes().get(kind) if type(kind) is str else None
        if wire_class is not None:
            return self._object(wire_class, tree)
        if kind == "map":
            of = tree.get("of")
            if not isinstance(of, dict):
                raise ProtocolError("a map of the frame's tree has no contents")
            return {key: self.value(item) for key, item in of.items()}
        if kind == "float":
            if tree.get("is") not in ("nan", "inf", "-inf"):
                raise ProtocolError("a float of the frame's tree is none of nan, inf, -inf")
            return float(tree["is"])
        if kind == "error":
            return RemoteRLError.from_wire(tree)
        raise ProtocolError(f"the frame's tree holds an object of unknown class {kind!r}")

    def _item(self, tree: Any) -> Any:
        # a long list of references to one large array would cost a few bytes each here, and the
        # whole array each where a constructor joins its rows
        if isinstance(tree, dict) and "#" in tree:
            raise ProtocolError("a list of the frame's tree holds an array; rows are a Ragged")
        return self.value(tree)

    def _array(self, index: Any) -> Array:
        if type(index) is not int or not 0 <= index < len(self.arrays):
            raise ProtocolError(f"the frame's tree refers to array {index!r}, which is not there")
        return self.arrays[index]

    def _object(self, wire_class: type, tree: dict[str, Any]) -> Any:
        del tree["@"]
        for key, item in tree.items():
            if type(item) not in _READ_AS_THEY_ARE:
                tree[key] = self.value(item)
        try:
            return submit_of(tree) if wire_class is Submit else wire_class(**tree)
        except RemoteRLError:
            raise
        except (
            TypeError,
            ValueError,
            AttributeError,
            KeyError,
            IndexError,
            OverflowError,
        ) as error:
            raise ProtocolError(
                f"the fields of a {wire_class.__name__} are not what they must be: {error}"
            ) from error


@functools.cache
def _layouts() -> Mapping[type, tuple[str, tuple[tuple[str, str], ...]]]:
    """Of every class of the wire, how its JSON begins and the fields that are sent, each as what
    stands before its value and its name."""
    return {
        each: (
            f'{{"@":"{each.__name__}"',
            tuple(
                (f',"{field.name}":', field.name)
                for field in attrs.fields(each)
                if field.init and field.metadata.get(KIND) != "local"
            ),
        )
        for each in wire_classes().values()
    }
