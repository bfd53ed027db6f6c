"""Arctic backend: how weights reach a vLLM worker (imports torch, vllm and weights).

vLLM asks for a worker engine by name, and tells it for each update what comes. Ours takes all that
`weights.sources` lists, whatever way a sync takes, since a push always comes through shared memory.
That, and what is broadcast, it loads itself; for CUDA IPC it uses vLLM's own engine, UNVERIFIED.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from remote_rl.errors import BackendError

from ..weights.broadcast import Group, join
from ..weights.manifest import Entry, Manifest
from ..weights.segment import Segment
from ..weights.sources import IpcHandles, Meeting, Source

#: what ours is called in vLLM's registry of worker engines
BACKEND = "remote_rl"


def update_info(manifest: Manifest, source: Source) -> dict[str, Any]:
    """What the worker engine is told."""
    if isinstance(source, IpcHandles):
        return {
            "names": [entry.name for entry in manifest],
            "dtype_names": [entry.dtype for entry in manifest],
            "shapes": [list(entry.shape) for entry in manifest],
            "ipc_handles": [dict(handle) for handle in source.handles],
        }
    if isinstance(source, str):
        return {"entries": manifest.entries, "segment": source}
    return {"entries": manifest.entries, "group": source.group}


@dataclass
class Invitation(WeightTransferInitInfo):
    """To the group of a broadcast. first: the number in it of this engine's first worker."""

    meeting: Meeting
    first: int


@dataclass
class Update(WeightTransferUpdateInfo):
    """entries: the tensors. segment: of shared memory that holds them; else group: in which they
    are broadcast, in this order."""

    entries: tuple[Entry, ...]
    segment: str | None = None
    group: str | None = None


class WeightEngine(WeightTransferEngine):
    """Loads a model's weights layer by layer: on a CPU vLLM holds them packed, so that each layer
    must be made anew and copied to where it is.

    taken: what the model asked for in the last update; None where vLLM's own engines don't tell.
    """

    init_info_cls = Invitation
    update_info_cls = Update
    taken: list[Entry] | None = None
    _group: Group | None = None

    def init_transfer_engine(self, init_info: Invitation) -> None:
        """Joins the group of the trainer's rank 0, after leaving the last one."""
        self._leave()
        number = init_info.first + self.parallel_config.rank
        self._group = join(init_info.meeting, number)

    def start_weight_update(self) -> None:
        """Puts aside the tensors that are served."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads what it is told of."""
        self.taken = None
        if "ipc_handles" in update_info:
            self._of_vllm(IPCWeightTransferEngine).update_weights(update_info)
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

    def receive_weights(self, update_info: Update) -> None:
        """Loads what the segment holds, or what is broadcast; `taken` is then what the model asked
        for."""
        if update_info.segment is not None:
            self.model.load_weights(self._asked(_held(update_info.segment, update_info.entries)))
            return
        try:
            tensors = self._broadcast(update_info)
            self.model.load_weights(self._asked(tensors))
            for _ in tensors:  # what the model did not ask for comes too
                pass
        except BaseException:
            self._leave()  # so that nobody waits for this end
            raise

    def _asked(
        self, tensors: Iterable[tuple[Entry, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        self.taken = taken = list[Entry]()
        for entry, tensor in tensors:
            yield entry.name, tensor
            taken.append(entry)

    def _broadcast(self, update_info: Update) -> Iterator[tuple[Entry, torch.Tensor]]:
        group = self._group
        if group is None or group.meeting.name != update_info.group:
            raise BackendError(f"this worker is in no group {update_info.group!r}; sync again")
        for entry in update_info.entries:
            tensor = torch.empty(
                entry.shape, dtype=getattr(torch, entry.dtype), device=group.device
            )
            group.carry(tensor)
            yield entry, tensor

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def finish_weight_update(self) -> None:
        """Copies the last layers to their places."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leaves the group, if there is one."""
        self._leave()
        for engine in self.__dict__.get("_others", {}).values():
            engine.shutdown()


def _held(segment: str, entries: tuple[Entry, ...]) -> Iterator[tuple[Entry, torch.Tensor]]:
    attached = Segment.attach(segment)
    attached.holds(Manifest(entries))
    for entry in entries:
        array = torch.from_numpy(attached.array(entry))
        yield entry, array.view(getattr(torch, entry.dtype))


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, WeightEngine)
