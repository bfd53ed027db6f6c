"""Arctic backend: how weights reach a vLLM worker (imports torch, vllm and weights).

vLLM asks for a worker engine by name, and tells it for each update what comes. Ours takes all that
`weights.sources` lists, whatever way a sync takes, since a push always comes through shared memory.
It reads that itself; for CUDA IPC and NCCL it uses vLLM's own engines, UNVERIFIED here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from ..weights.manifest import Entry, Manifest
from ..weights.segment import Segment
from ..weights.sources import IpcHandles, Source

#: what ours is called in vLLM's registry of worker engines
BACKEND = "remote_rl"


def update_info(manifest: Manifest, source: Source) -> dict[str, Any]:
    """What the worker engine is told."""
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
class SharedMemoryUpdate(WeightTransferUpdateInfo):
    """segment: its name. entries: the tensors in it."""

    segment: str
    entries: tuple[Entry, ...]


class WeightEngine(WeightTransferEngine):
    """Loads a model's weights layer by layer: on a CPU vLLM holds them packed, so that each layer
    must be made anew and copied to where it is.

    taken: what the model asked for in the last update; None where vLLM's own engines don't tell.
    """

    init_info_cls = NCCLWeightTransferInitInfo
    update_info_cls = SharedMemoryUpdate
    taken: list[Entry] | None = None

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """UNVERIFIED. Joins the trainer's NCCL group."""
        self._of_vllm(NCCLWeightTransferEngine).init_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        """Puts aside the tensors that are served."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads what it is told of."""
        self.taken = None
        if "ipc_handles" in update_info:
            self._of_vllm(IPCWeightTransferEngine).update_weights(update_info)
        elif "segment" not in update_info:
            self._of_vllm(NCCLWeightTransferEngine).update_weights(update_info)
        else:
            # vLLM's own version waits for an accelerator, which a CPU is none
            self.receive_weights(self.parse_update_info(update_info))
            if self.device.type != "cpu":
                torch.accelerator.synchronize()

    def _of_vllm(self, kind: type[WeightTransferEngine]) -> WeightTransferEngine:
        """vLLM's own engine of this kind for the same model, made on first use."""
        held = self.__dict__.setdefault("_others", {})
        if kind not in held:
            held[kind] = kind(self.config, self.vllm_config, self.device, self.model)
        engine: WeightTransferEngine = held[kind]
        return engine

    def receive_weights(self, update_info: SharedMemoryUpdate) -> None:
        """Loads what the segment holds; `taken` is then what the model asked for."""
        self.taken = []
        self.model.load_weights(self._tensors(update_info))

    def _tensors(self, update_info: SharedMemoryUpdate) -> Iterator[tuple[str, torch.Tensor]]:
        taken = self.taken
        assert taken is not None, "receive_weights has begun it"
        attached = Segment.attach(update_info.segment)
        attached.holds(Manifest(update_info.entries))
        for entry in update_info.entries:
            array = torch.from_numpy(attached.array(entry))
            yield entry.name, array.view(getattr(torch, entry.dtype))
            taken.append(entry)

    def finish_weight_update(self) -> None:
        """Copies the last layers to their places."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leaves the NCCL group, if there is one."""
        for engine in self.__dict__.get("_others", {}).values():
            engine.shutdown()


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, WeightEngine)
