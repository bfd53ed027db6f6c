"""Arctic backend: the three ways in which tensors come to a sampler (imports nothing heavy).

    str            the name of a segment of shared memory (segment.py); tested on CPUs
    IpcHandles     CUDA IPC handles of the trainer's tensors, on the same GPUs; UNVERIFIED
    NcclBroadcast  the trainer broadcasts meanwhile over NCCL; UNVERIFIED, and no sync takes it yet

The senders of the last two are in device_paths.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeAlias

import attrs


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
class NcclBroadcast:
    """UNVERIFIED. The trainer's rank 0 broadcasts the manifest's tensors in its order, while the
    update runs, in the group that `SamplerEngine.connect` has joined."""


Source: TypeAlias = str | IpcHandles | NcclBroadcast
