"""Arctic backend: what a set of weights is made of, and where each tensor lies (imports numpy,
errors, and the contract's dtype tags).

A manifest is written by whoever sends weights and checked by whoever takes them, before a byte
moves: names, shapes and dtypes must be exactly those of the model.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import attrs
import numpy as np

from remote_rl.errors import InvalidRequestError, nearest
from remote_rl.types.results import TENSOR_DTYPES

#: a tensor's shape and its dtype, a tag of TENSOR_DTYPES
Form: TypeAlias = tuple[tuple[int, ...], str]

#: bytes that each tensor's place is a multiple of: a cache line, and more than any dtype needs
ALIGNMENT = 64
#: dtypes that are cast into each other where weights are loaded
FLOATING = frozenset({"float64", "float32", "float16", "bfloat16"})
#: names that an error lists before it says how many more there are
NAMED = 5


def _shape(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


@attrs.frozen
class Entry:
    """One tensor: its Hugging Face name, its shape, its dtype (a tag of TENSOR_DTYPES), and the
    byte at which it begins."""

    name: str
    shape: tuple[int, ...] = attrs.field(converter=_shape)
    dtype: str = attrs.field(validator=attrs.validators.in_(TENSOR_DTYPES))
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes."""
        return math.prod(self.shape) * np.dtype(TENSOR_DTYPES[self.dtype]).itemsize

    @property
    def form(self) -> Form:
        """Shape and dtype."""
        return self.shape, self.dtype


def _entries(values: Iterable[Entry]) -> tuple[Entry, ...]:
    return tuple(values)


@attrs.frozen
class Manifest:
    """Tensors in the order in which they are sent; no name comes twice."""

    entries: tuple[Entry, ...] = attrs.field(converter=_entries)

    def __attrs_post_init__(self) -> None:
        names = [entry.name for entry in self.entries]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidRequestError(f"the manifest names tensor {twice!r} twice", field=twice)

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    @property
    def forms(self) -> dict[str, Form]:
        """Shape and dtype by name."""
        return {entry.name: entry.form for entry in self.entries}

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors themselves, without what lies between them."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def extent(self) -> int:
        """Bytes from the first place to the end of the last tensor; at least 1."""
        return max((entry.offset + entry.nbytes for entry in self.entries), default=0) or 1

    @property
    def fingerprint(self) -> str:
        """That of its names, shapes and dtypes."""
        return fingerprint(self.forms)


def lay_out(forms: Mapping[str, Form]) -> Manifest:
    """A manifest of these tensors, one after the other in their order, each at a multiple of
    ALIGNMENT."""
    entries, offset = [], 0
    for name, (shape, dtype) in forms.items():
        entry = Entry(name, shape, dtype, offset)
        entries.append(entry)
        offset += -(-entry.nbytes // ALIGNMENT) * ALIGNMENT
    return Manifest(entries)


def fingerprint(forms: Mapping[str, Form]) -> str:
    """Hexadecimal SHA-256 of names, shapes and dtypes, whatever their order."""
    rows = [[name, dtype, list(shape)] for name, (shape, dtype) in sorted(forms.items())]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def cast(given: Mapping[str, Form], expected: Mapping[str, Form]) -> dict[str, Form]:
    """The given forms, each floating dtype as the expected one of that name where that floats too:
    what it is cast to as it is loaded."""
    forms = {}
    for name, (shape, dtype) in given.items():
        wanted = expected[name][1] if name in expected else dtype
        forms[name] = (shape, wanted if {wanted, dtype} <= FLOATING else dtype)
    return forms


def check(given: Mapping[str, Form], expected: Mapping[str, Form], what: str = "the model") -> None:
    """Raises `InvalidRequestError`, by name, unless `given` is exactly `expected`: nothing missing,
    nothing more, every shape and dtype the same. `what` is whose tensors the expected ones are."""
    missing = [name for name in expected if name not in given]
    unknown = [name for name in given if name not in expected]
    faults = _renamed(missing, unknown, given, expected, what)
    faults += [
        f"{what} has no tensor {name!r} ({nearest(name, expected)})" for name in unknown[:NAMED]
    ]
    faults += _more(unknown, "unknown ones")
    faults += [f"tensor {name!r} of {what} is missing" for name in missing[:NAMED]]
    faults += _more(missing, "missing ones")
    both = [name for name in given if name in expected]
    shapes = [name for name in both if given[name][0] != expected[name][0]]
    faults += [
        f"tensor {name!r} has shape {list(given[name][0])}, that of {what} "
        f"{list(expected[name][0])}"
        for name in shapes[:NAMED]
    ]
    faults += _more(shapes, "of another shape")
    dtypes = [name for name in both if given[name][1] != expected[name][1]]
    faults += [
        f"tensor {name!r} has dtype {given[name][1]}, that of {what} {expected[name][1]}"
        for name in dtypes[:NAMED]
    ]
    faults += _more(dtypes, "of another dtype")
    if faults:
        first = unknown or missing or shapes or dtypes
        raise InvalidRequestError("; ".join(faults), field=first[0])


def _renamed(
    missing: list[str],
    unknown: list[str],
    given: Mapping[str, Form],
    expected: Mapping[str, Form],
    what: str,
) -> list[str]:
    """Where exactly one tensor is missing and exactly one unknown, of one form: it has another
    name."""
    if len(missing) != 1 or len(unknown) != 1 or given[unknown[0]] != expected[missing[0]]:
        return []
    return [f"tensor {unknown[0]!r} is called {missing[0]!r} in {what}"]


def _more(names: list[str], what: str) -> list[str]:
    return [f"and {len(names) - NAMED} more {what}"] if len(names) > NAMED else []


def not_finite(name: str) -> InvalidRequestError:
    """The refusal of weights of which this tensor holds NaN or infinity."""
    return InvalidRequestError(
        f"tensor {name!r} holds NaN or infinity; nothing could be drawn from it", field=name
    )
