"""Arctic backend: the trainer's side of broadcasts and of CUDA IPC (imports torch, broadcast and
manifest).

Both take tensors as SegmentWriter does: `write(name, tensor)` in the manifest's order, then
`finish()`. The IPC part was written against the source of vLLM 0.32 (distributed/weight_transfer/
ipc_engine.py, which is the workers' side) and is UNVERIFIED: no machine of the project has CUDA.
"""

from __future__ import annotations

from typing import Any

import torch

from remote_rl.errors import BackendError, InvalidRequestError, RemoteRLError, describe

from .broadcast import Group
from .manifest import Entry, Manifest, not_finite
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


class BroadcastWriter:
    """Rank 0's side of one delivery. It takes tensors in the manifest's order, as the other writers
    do, but raises nothing, since a rank must go to the end of its gathers: after a failure it takes
    no more, and `failure` says what it was."""

    def __init__(self, group: Group | None, manifest: Manifest) -> None:
        self._group = group
        self._order = _InOrder(manifest)
        self.failure: RemoteRLError | None = None
        if group is None:
            self.failure = BackendError("rank 0 is not in the group; sync again", group=True)

    def write(self, name: str, tensor: torch.Tensor) -> Entry | None:
        """Broadcasts it; returns when it has gone."""
        if self.failure is not None or self._group is None:
            return None
        try:
            self._group.go_on()
            entry, cast = self._order.next(name, tensor)
            if not finite(cast):  # what is merged or cast can be, where its parts are not
                raise not_finite(name)
            self._group.carry(cast.to(self._group.device))
            return entry
        except Exception as error:  # noqa: BLE001 - it is kept, and told when all ranks are through
            self._fail(error)
            return None

    def finish(self) -> RemoteRLError | None:
        """What went wrong, None where all were sent."""
        if self.failure is None:
            try:
                self._order.end()
            except BackendError as error:
                self._fail(error)
        return self.failure

    def _fail(self, error: Exception) -> None:
        self.failure = (
            error
            if isinstance(error, RemoteRLError)
            else BackendError(
                f"rank 0 could not send the weights ({describe(error)}); sync again",
                worker="rank 0",
            )
        )
        if self._group is not None:
            self._group.abort()


def finite(tensor: torch.Tensor) -> bool:
    """Whether it holds neither NaN nor infinity."""
    if not (tensor.numel() and tensor.is_floating_point()):
        return True
    # NaN comes through both; no temporary of the tensor's size
    return all(bool(torch.isfinite(each)) for each in torch.aminmax(tensor))
