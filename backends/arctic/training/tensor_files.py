"""Arctic backend: files of tensors in the safetensors format, written and read a part at a time
(imports numpy, torch).

Eight bytes of the header's length (little-endian), a JSON header padded with spaces to a multiple
of eight, then the raw little-endian tensors.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import attrs
import numpy as np
import torch

from ..weights.manifest import Form

_TAGS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}
_SIZES = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8}
_LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000


class TensorWriter:
    """A file of tensors whose shapes and dtypes are known beforehand, written one at a time in
    their order. Leaving the context makes it durable; a failure leaves a file that isn't whole."""

    def __init__(
        self, path: Path, forms: Mapping[str, Form], metadata: Mapping[str, str] | None = None
    ) -> None:
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        offset = 0
        for name, (shape, dtype) in forms.items():
            tag = _TAGS[dtype]
            end = offset + math.prod(shape) * _SIZES[tag]
            header[name] = {"dtype": tag, "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._left = list(forms.items())[::-1]
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(_LENGTH_BYTES, "little"))
        self._file.write(text)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """The next tensor, from any device."""
        expected, (shape, dtype) = self._left.pop()
        given = (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if given != (expected, tuple(shape), dtype):
            raise ValueError(f"{(expected, tuple(shape), dtype)} was to be written, not {given}")
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        self._file.write(memoryview(flat.view(torch.uint8).numpy()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                if self._left:
                    raise ValueError(f"tensor {self._left[-1][0]!r} was not written")
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


def write_tensors(
    path: Path,
    forms: Mapping[str, Form],
    tensors: Iterator[tuple[str, torch.Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> OSError | None:
    """A file of all `tensors`; what prevented it, or None. Goes to their end whatever happens,
    since other ranks take part in making them."""
    try:
        with TensorWriter(path, forms, metadata) as file:
            for name, tensor in tensors:
                file.write(name, tensor)
    except OSError as error:
        for _ in tensors:
            pass
        return error
    return None


@attrs.frozen
class StoredTensor:
    """Where a tensor's bytes begin in its file."""

    path: Path
    shape: tuple[int, ...]
    begin: int


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """The float32 tensors of a file by name. Raises `ValueError` where the file is damaged."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if not 0 < length <= min(size - _LENGTH_BYTES, _LONGEST_HEADER):
            raise ValueError(f"{path.name} is cut short or no safetensors file")
        header = json.loads(file.read(length))
    start = _LENGTH_BYTES + length
    found: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        shape = tuple(int(each) for each in entry["shape"])
        whole = end - begin == math.prod(shape) * _SIZES["F32"] and begin >= 0
        if entry["dtype"] != "F32" or not whole or start + end > size:
            raise ValueError(f"tensor {name!r} of {path.name} is cut short or not float32")
        found[name] = StoredTensor(path, shape, start + begin)
    return found


def read_part(stored: StoredTensor, start: int, length: int) -> torch.Tensor:
    """[length] float32, from number `start` on in the flattened tensor."""
    offset = stored.begin + start * _SIZES["F32"]
    part = np.fromfile(stored.path, "<f4", count=length, offset=offset)
    if len(part) < length:
        raise ValueError(f"{stored.path.name} is cut short")
    return torch.from_numpy(part)


def sync_directory(directory: Path) -> None:
    """Makes the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
