"""Dispatcher: how much is kept for one client, in bytes of arrays (imports requests, types)."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from ..requests import ReadFile
from ..types.arrays import Array

#: what is kept for one client at most, beside one operation of each of its streams
DEFAULT_BUDGET = 4 << 30
#: a piece of a file is answered with at most this many bytes
FILE_CHUNK = 16 << 20


class Ledger:
    """Bytes that are kept for one client, and who waits until they are fewer."""

    def __init__(self) -> None:
        self.kept = 0
        self._news: asyncio.Event | None = None

    def change(self, difference: int) -> None:
        """So many bytes more, or fewer."""
        self.kept += difference
        if difference < 0:
            self.tell()

    def tell(self) -> None:
        """Whoever waits for room looks again."""
        if self._news is not None:
            self._news.set()
            self._news = None

    async def news(self, timeout: float) -> None:
        """Waits until there may be room, for `timeout` seconds at most."""
        if self._news is None:
            self._news = asyncio.Event()
        try:
            async with asyncio.timeout(timeout):
                await self._news.wait()
        except TimeoutError:
            pass  # whoever waited looks at the clock itself


def request_bytes(request: Any) -> int:
    """What accepting this request costs: its arrays, and of a piece of a file the answer."""
    if isinstance(request, ReadFile):
        return min(request.length, FILE_CHUNK)
    return array_bytes(request)


def array_bytes(value: Any) -> int:
    """Bytes of all arrays in an object of the contract, each array counted once."""
    kind: Any = type(value)
    if _never_holds_arrays(kind):
        return 0
    found = _arrays(value)
    return sum(each.nbytes if isinstance(each, np.ndarray) else len(each) for each in found)


def lies_in_a_message(value: Any) -> bool:
    """Whether some array is a view into a received body, which lives as long as the array."""
    kind: Any = type(value)
    if _never_holds_arrays(kind):
        return False
    return any(map(_is_view_of_bytes, _arrays(value)))


def _arrays(value: Any) -> Collection[Array | bytes]:
    found: dict[int, Array | bytes] = {}
    _collect(value, found)
    return found.values()


def _collect(value: Any, found: dict[int, Array | bytes]) -> None:
    if isinstance(value, (np.ndarray, bytes)):
        found[id(value)] = value
        return
    kind: Any = type(value)
    names = _fields(kind)
    if names:
        for name in names:
            held = getattr(value, name)
            if held is not None:
                _collect(held, found)
    elif isinstance(value, Mapping):
        for item in value.values():
            _collect(item, found)


@functools.cache
def _never_holds_arrays(some_class: type) -> bool:
    """Of most small requests and results: nothing in them needs a look."""
    kind: Any = some_class
    return not issubclass(kind, (np.ndarray, bytes, Mapping)) and not _fields(kind)


@functools.cache
def _fields(some_class: type) -> tuple[str, ...]:
    """Those that may hold arrays, asked once: the rest would cost each operation its time."""
    return tuple(
        field.name
        for field in getattr(some_class, "__attrs_attrs__", ())
        if str(field.type).removesuffix(" | None") not in ("str", "int", "float", "bool", "Label")
    )


def _is_view_of_bytes(array: Array | bytes) -> bool:
    base = getattr(array, "base", None)
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, (memoryview, bytes, bytearray))
