"""Arctic backend: memory of tensors that is given back and taken again, the tensors themselves and
all views of them staying what they are (imports torch)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


class Offloaded:
    """The contents of storages, in host memory (not page-locked: it would have to be made anew
    each time, which costs more than the slower copy). Until `restore` the tensors have sizes and no
    memory, and nothing may touch them. held: tensors, in lists and mappings."""

    def __init__(self, held: Any) -> None:
        self._held: list[tuple[torch.UntypedStorage, Tensor]] = []
        for tensor in _tensors(held):
            storage = tensor.untyped_storage()
            # empty where another tensor of the same storage came before; what can't be resized is
            # mapped from the model's file, and no device's
            if storage.nbytes() and storage.resizable():
                host = torch.empty(storage.nbytes(), dtype=torch.uint8)
                self._held.append((storage, host.copy_(_bytes(storage))))
                storage.resize_(0)

    @property
    def nbytes(self) -> int:
        """How much was given back."""
        return sum(host.nbytes for _, host in self._held)

    def restore(self) -> None:
        """All is as before. Where the device has no room for all, what is not there yet is still
        held, for another try."""
        while self._held:
            storage, host = self._held[-1]
            storage.resize_(host.nbytes)
            _bytes(storage).copy_(host)
            self._held.pop()


def _tensors(held: Any) -> Iterator[Tensor]:
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, Mapping | list | tuple):
        for each in held.values() if isinstance(held, Mapping) else held:
            yield from _tensors(each)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
    whole.set_(storage)
    return whole
