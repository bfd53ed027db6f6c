"""Arctic backend: how weights reach a vLLM worker (imports torch, vllm and weights).

One interface, vLLM's: a worker engine named in the engine's configuration, and for each update a
dictionary that tells it what comes. Shared memory has a worker engine of ours; CUDA IPC and NCCL
are vLLM's own "ipc" and "nccl", and UNVERIFIED here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from ..weights.manifest import Entry, Manifest
from ..weights.segment import Segment
from ..weights.sources import IpcHandles, Source
from .settings import WeightPath

#: what a path is called in vLLM's registry of worker engines
BACKENDS: Mapping[WeightPath, str] = {
    "shared_memory": "remote_rl_shared_memory",
    "cuda_ipc": "ipc",
    "nccl": "nccl",
}


def update_info(manifest: Manifest, source: Source) -> dict[str, Any]:
    """What the worker engine of this source is told."""
    if isinstance(source, str):
        return {"segment": source, "entries": manifest.entries}
    told: dict[str, Any] = {
        "names": [entry.name for entry in manifest],
        "dtype_names": [entry.dtype for entry in manifest],
        "shapes": [list(entry.shape) for entry in manifest],
    }
    if isinstance(source, IpcHandles):
        told["ipc_handles"] = [dict(handle) for handle in source.handles]
    return told


@dataclass
class SharedMemoryInit(WeightTransferInitInfo):
    """Nothing to agree on."""


@dataclass
class SharedMemoryUpdate(WeightTransferUpdateInfo):
    """segment: its name. entries: the tensors in it."""

    segment: str
    entries: tuple[Entry, ...]


class SharedMemoryEngine(WeightTransferEngine):
    """Loads a model's weights from a segment of shared memory, layer by layer: on a CPU vLLM holds
    them packed, so that each layer must be made anew and copied to where it is."""

    init_info_cls = SharedMemoryInit
    update_info_cls = SharedMemoryUpdate

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Puts aside the tensors that are served."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads what the segment holds."""
        # vLLM's own version waits for an accelerator, which a CPU is none
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: SharedMemoryUpdate) -> None:
        """Loads what the segment holds; `taken` is then what the model asked for."""
        self.taken: list[Entry] = []
        self.model.load_weights(self._tensors(update_info))

    def _tensors(self, update_info: SharedMemoryUpdate) -> Iterator[tuple[str, torch.Tensor]]:
        attached = Segment.attach(update_info.segment)
        attached.holds(Manifest(update_info.entries))
        for entry in update_info.entries:
            array = torch.from_numpy(attached.array(entry))
            yield entry.name, array.view(getattr(torch, entry.dtype))
            self.taken.append(entry)

    def finish_weight_update(self) -> None:
        """Copies the last layers to their places."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is held between updates."""


if BACKENDS["shared_memory"] not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKENDS["shared_memory"], SharedMemoryEngine)
