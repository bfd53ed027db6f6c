"""Arctic backend: the trainer's side of CUDA IPC and NCCL. UNVERIFIED (imports torch and vllm).

Both were written against the source of vLLM 0.32 (distributed/weight_transfer/ipc_engine.py and
nccl_engine.py, which are the workers' side) and have never run: no machine of the project has CUDA.
They take tensors as SegmentWriter does: `write(name, tensor)` in the manifest's order on rank 0,
then `finish()`. A sync uses the first; NCCL waits for somebody with GPUs, since where one side of
a broadcast fails the other one hangs, and whoever joins them must end it.
"""

from __future__ import annotations

from typing import Any

import torch

from remote_rl.errors import BackendError, InvalidRequestError

from .manifest import Entry, Manifest
from .sources import IpcHandles


class _InOrder:
    """Holds a writer to the manifest's order."""

    def __init__(self, manifest: Manifest) -> None:
        self._left = list(reversed(manifest.entries))

    def next(self, name: str, tensor: torch.Tensor) -> tuple[Entry, torch.Tensor]:
        if not self._left or self._left[-1].name != name:
            wanted = repr(self._left[-1].name) if self._left else "no more"
            raise InvalidRequestError(
                f"tensor {name!r} comes where the manifest has {wanted}", field=name
            )
        entry = self._left.pop()
        if tuple(tensor.shape) != entry.shape:
            raise InvalidRequestError(
                f"tensor {name!r} has shape {list(tensor.shape)}, in the manifest "
                f"{list(entry.shape)}",
                field=name,
            )
        cast = tensor.detach().to(getattr(torch, entry.dtype)).contiguous()
        return entry, cast

    def end(self) -> None:
        if self._left:
            raise BackendError(
                f"{len(self._left)} tensors were not written, {self._left[-1].name!r} first"
            )


class IpcWriter:
    """UNVERIFIED. Collects handles of the tensors, which it keeps alive (a cast or gathered copy
    each, so about the model's size on the GPU) until it is dropped after the update.

    Every rank makes handles of its own GPU, and `IpcHandles.merged` puts them together.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._order = _InOrder(manifest)
        self._kept: list[torch.Tensor] = []
        self._handles: list[dict[str, Any]] = []

    def write(self, name: str, tensor: torch.Tensor) -> Entry:
        """Takes a tensor on a CUDA device."""
        from torch.multiprocessing.reductions import reduce_tensor

        entry, cast = self._order.next(name, tensor)
        gpu = str(torch.cuda.get_device_properties(cast.device).uuid)
        _, arguments = reduce_tensor(cast)
        self._kept.append(cast)
        self._handles.append({gpu: arguments})
        return entry

    def finish(self) -> IpcHandles:
        """What `SamplerEngine.update` takes as its source."""
        self._order.end()
        torch.cuda.synchronize()
        return IpcHandles(tuple(self._handles))


class NcclGroup:
    """UNVERIFIED. The group of the trainer's rank 0 and all sampler workers. Its constructor waits
    for the workers: `SamplerEngine.connect(rendezvous(...))` of every engine runs meanwhile."""

    def __init__(self, address: str, port: int, workers: int) -> None:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        self._group = trainer_init(
            {"master_address": address, "master_port": port, "world_size": 1 + workers}
        )

    def writer(self, manifest: Manifest) -> NcclWriter:
        """For one update."""
        return NcclWriter(self._group, manifest)

    def close(self) -> None:
        """Leaves the group."""
        self._group.destroy()


class NcclWriter:
    """UNVERIFIED. Broadcasts each tensor as it is written, while every engine's update runs with
    `NcclBroadcast()` as its source. An error on either side leaves the group unusable: it and the
    engines must be started again."""

    def __init__(self, group: Any, manifest: Manifest) -> None:
        self._group = group
        self._order = _InOrder(manifest)

    def write(self, name: str, tensor: torch.Tensor) -> Entry:
        """Takes a tensor on the CUDA device of the group."""
        entry, cast = self._order.next(name, tensor)
        self._group.broadcast(cast, src=0, stream=torch.cuda.current_stream())
        return entry

    def finish(self) -> None:
        """Returns when all were sent."""
        self._order.end()
        torch.cuda.current_stream().synchronize()


def rendezvous(
    address: str, port: int, engine: int, engines: int, workers_each: int
) -> dict[str, Any]:
    """UNVERIFIED. What `SamplerEngine.connect` of this engine is given; the trainer is rank 0."""
    return {
        "master_address": address,
        "master_port": port,
        "rank_offset": 1 + engine * workers_each,
        "world_size": 1 + engines * workers_each,
        "packed": False,
    }
