"""Arctic backend: the three ways in which tensors come to a sampler (imports nothing heavy).

str         the name of a segment of shared memory (segment.py); tested on CPUs
IpcHandles  CUDA IPC handles of the trainer's tensors, on the same GPUs (device_paths.py);
            UNVERIFIED
Broadcast   the trainer's rank 0 broadcasts meanwhile (broadcast.py), over gloo, tested on CPUs,
            or NCCL, UNVERIFIED
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, TypeAlias

import attrs

#: what a group broadcasts by
Kind: TypeAlias = Literal["gloo", "nccl"]


@attrs.frozen
class IpcHandles:
    """UNVERIFIED. handles: for each tensor of the manifest, in its order, {GPU uuid: arguments of
    rebuild_cuda_tensor}, one entry for each GPU that a sampler's worker runs on."""

    handles: tuple[Mapping[str, Any], ...]

    @classmethod
    def merged(cls, each: Sequence[IpcHandles]) -> Self:
        """Of what every rank lends of the same tensors, each on its own GPU."""
        rows = zip(*(one.handles for one in each), strict=True)
        return cls(tuple({gpu: found for one in row for gpu, found in one.items()} for row in rows))


@attrs.frozen
class Meeting:
    """Where a group meets. name: no other group's. address, port: of rank 0's store. size: rank 0
    and all sampler workers. patience: seconds for the meeting, and for each piece later."""

    kind: Kind
    name: str
    address: str
    port: int
    size: int
    patience: float


@attrs.frozen
class Broadcast:
    """Rank 0 broadcasts the manifest's tensors in its order, while the update runs, in the group of
    this name, which `SamplerEngine.connect` has joined."""

    group: str


Source: TypeAlias = str | IpcHandles | Broadcast
