"""Wire: typed objects to a JSON tree with array references, and back (imports the contract).

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
import math
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import xxhash

from ..errors import InvalidRequestError, ProtocolError, RemoteRLError
from ..types.arrays import Array
from ..types.fields import KIND
from .frames import Frame, join, parse
from .vocabulary import wire_classes


def encode(value: Any) -> Frame:
    """`value`, an object of the contract, as a frame; arrays are referred to, not copied."""
    arrays: list[Array] = []
    return join(_Encoder(arrays).tree(value), arrays)


def decode(data: bytes | bytearray | memoryview) -> Any:
    """The object of a received frame; its arrays are read-only views into `data`.

    Raises `ProtocolError` for what no client of this protocol would send and the constructor's
    own error (`InvalidRequestError`) for an object that says what it must not.
    """
    tree, arrays = parse(data)
    try:
        return _Decoder(arrays).value(tree)
    except RecursionError as error:
        raise ProtocolError("the frame's tree is nested too deeply") from error


def digest(value: Any) -> str:
    """32 hex digits that differ where two requests differ: xxh3-128 over the frame's bytes.

    It tells accidents apart (a number used again for other contents), not forgeries; whoever may
    forge it holds the run's token and could send anything anyway.
    """
    state = xxhash.xxh3_128()
    for part in encode(value).parts:
        state.update(part)
    return state.hexdigest()


class _Encoder:
    def __init__(self, arrays: list[Array]) -> None:
        self.arrays = arrays
        self._index: dict[int, int] = {}

    def tree(self, value: Any) -> Any:
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, (int, np.integer)):
            return int(value)
        if isinstance(value, (float, np.floating)):
            number = float(value)
            return number if math.isfinite(number) else {"@": "float", "is": str(number)}
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, (bytes, bytearray, memoryview)):
            return self._array(np.frombuffer(value, np.uint8))
        if isinstance(value, Mapping):
            return {"@": "map", "of": {str(key): self.tree(item) for key, item in value.items()}}
        if isinstance(value, (set, frozenset)):
            return [self.tree(item) for item in sorted(value)]
        if isinstance(value, (tuple, list)):
            return [self.tree(item) for item in value]
        if isinstance(value, RemoteRLError):
            return {"@": "error", **value.to_wire()}
        return self._object(value)

    def _array(self, array: Array) -> dict[str, int]:
        # one array referred to from several fields (a batch's offsets) crosses once
        index = self._index.get(id(array))
        if index is None:
            index = self._index[id(array)] = len(self.arrays)
            self.arrays.append(array)
        return {"#": index}

    def _object(self, value: Any) -> dict[str, Any]:
        name = type(value).__name__
        if wire_classes().get(name) is not type(value):
            raise InvalidRequestError(
                f"a {type(value).__module__}.{name} can't cross the wire; "
                "pass plain values, arrays or the classes of remote_rl"
            )
        result: dict[str, Any] = {"@": name}
        for field in _sent_fields(name):
            result[field] = self.tree(getattr(value, field))
        return result


class _Decoder:
    def __init__(self, arrays: list[Array]) -> None:
        self.arrays = arrays

    def value(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return tuple(self._item(item) for item in tree)
        if not isinstance(tree, dict):
            return tree
        if "#" in tree:
            return self._array(tree["#"])
        kind = tree.get("@")
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
        return self._object(kind, tree)

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

    def _object(self, name: Any, tree: dict[str, Any]) -> Any:
        wire_class = wire_classes().get(name) if isinstance(name, str) else None
        if wire_class is None:
            raise ProtocolError(f"the frame's tree holds an object of unknown class {name!r}")
        fields = {key: self.value(item) for key, item in tree.items() if key != "@"}
        try:
            return wire_class(**fields)
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
                f"the fields of a {name} are not what they must be: {error}"
            ) from error


@functools.cache
def _sent_fields(name: str) -> tuple[str, ...]:
    return tuple(
        field.name
        for field in attrs.fields(wire_classes()[name])
        if field.init and field.metadata.get(KIND) != "local"
    )
