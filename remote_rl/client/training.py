"""Client: the training face (imports the contract, faces, custom losses' runner)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from ..errors import InvalidRequestError
from ..losses import Custom, Loss
from ..requests import (
    Checkpoints,
    Delete,
    DropSnapshot,
    Export,
    FileKind,
    Forward,
    ForwardBackward,
    Load,
    OptimStep,
    RestoreSnapshot,
    Save,
    SetReference,
    Snapshot,
    ZeroGrad,
)
from ..run_info import CheckpointList
from ..types.batch import Batch
from ..types.results import (
    AdamW,
    CheckpointInfo,
    Done,
    ExportReceipt,
    ForwardBackwardResult,
    LoadResult,
    OptimStepResult,
    Outputs,
)
from .custom import computed_for, submit_custom
from .faces import Face
from .operation import Operation


class Training(Face):
    """The trainer: weights, accumulated gradient, optimizer, snapshots, reference, checkpoints.

    All its operations, and `weights.sync`, execute in the order of the calls. `deadline` (seconds)
    acts before an operation starts, never on one that runs. `model` is "policy": a run holds one
    model today, and any other is refused by name.

    What a call can see to be wrong it raises itself: `InvalidRequestError`, or `UnsupportedError`
    where the backend does not offer it. What only the run knows `.result()` raises, as said below;
    besides that `BackendError`, where the engine fails.
    """

    def forward(
        self,
        batch: Batch,
        outputs: Iterable[str] = ("logprobs",),
        policy: str = "current",
        *,
        model: str = "policy",
        deadline: float | None = None,
    ) -> Operation[Outputs]:
        """Per-token outputs, without a gradient.

        outputs: e.g. {"logprobs", "entropy"}. policy: "current", "reference" or a snapshot's name.
        The result's fields are Ragged[n] float32, entry t for response token t.
        `.result()` raises `InvalidRequestError` where there is no such snapshot.
        """
        request = Forward(
            batch=_checked_batch(batch).only(()), outputs=outputs, policy=policy, model=model
        )
        source = computed_for(batch, policy)

        def convert(outputs: Outputs) -> Outputs:
            return attrs.evolve(outputs, computed_for=source)

        operation: Operation[Outputs] = self._submit("forward", request, convert, deadline)
        return operation

    def forward_backward(
        self,
        batch: Batch,
        loss: Loss,
        *,
        outputs: Outputs | None = None,
        model: str = "policy",
        deadline: float | None = None,
    ) -> Operation[ForwardBackwardResult]:
        """Adds the gradient of `loss` on `batch` to the accumulator.

        A loss of `losses.custom` runs here, in this process: its outputs come from a forward that
        is paid for, or from `outputs`, those of the same rows at the current version.
        Raises `InvalidRequestError` where the batch lacks a field that the loss needs. `.result()`
        raises `DirtyGradientsError` after an earlier one failed, and `ConflictError` where
        cotangents or outputs are of another version of the weights.
        """
        _checked_batch(batch)
        if not isinstance(loss, Loss):
            raise InvalidRequestError(
                f"loss must be an instance of a loss of remote_rl.losses, such as losses.PPO(), "
                f"not {loss!r}",
                field="loss",
            )
        if isinstance(loss, Custom):
            return submit_custom(self, batch, loss, outputs, model, deadline)
        if outputs is not None:
            raise_only_custom()
        loss.check(batch)
        read = loss.required_fields | loss.optional_fields
        request = ForwardBackward(batch=batch.only(read), loss=loss, model=model)
        operation: Operation[ForwardBackwardResult] = self._submit(
            "forward_backward", request, deadline=deadline
        )
        return operation

    def optim_step(
        self, optimizer: AdamW, *, model: str = "policy", deadline: float | None = None
    ) -> Operation[OptimStepResult]:
        """Applies the accumulated gradient with these settings, and clears it.

        `.result()` raises `ConflictError` where nothing was accumulated, and `DirtyGradientsError`
        after a forward_backward failed. After a step that failed nobody knows the weights: what
        uses them is a `ConflictError` until a load, restore_snapshot or reset.
        """
        operation: Operation[OptimStepResult] = self._submit(
            "optim_step", OptimStep(optimizer=optimizer, model=model), deadline=deadline
        )
        return operation

    def zero_grad(self, *, model: str = "policy", deadline: float | None = None) -> Operation[Done]:
        """Discards the accumulated gradient, and with it an earlier failure."""
        operation: Operation[Done] = self._submit(
            "zero_grad", ZeroGrad(model=model), deadline=deadline
        )
        return operation

    def snapshot(
        self, name: str, *, model: str = "policy", deadline: float | None = None
    ) -> Operation[Done]:
        """Keeps the current weights under `name` in the trainer's memory.

        `.result()` raises `ConflictError` where the name is taken.
        """
        operation: Operation[Done] = self._submit(
            "snapshot", Snapshot(name=name, model=model), deadline=deadline
        )
        return operation

    def restore_snapshot(
        self, name: str, *, model: str = "policy", deadline: float | None = None
    ) -> Operation[Done]:
        """Makes a snapshot's weights the current ones, under a new version; clears the gradient.

        `.result()` raises `InvalidRequestError`, with the nearest name, where there is none of it.
        """
        operation: Operation[Done] = self._submit(
            "restore_snapshot", RestoreSnapshot(name=name, model=model), deadline=deadline
        )
        return operation

    def drop_snapshot(
        self, name: str, *, model: str = "policy", deadline: float | None = None
    ) -> Operation[Done]:
        """Forgets a snapshot; a reference that was set from it stays.

        `.result()` raises `InvalidRequestError`, with the nearest name, where there is none of it.
        """
        operation: Operation[Done] = self._submit(
            "drop_snapshot", DropSnapshot(name=name, model=model), deadline=deadline
        )
        return operation

    def set_reference(
        self, source: str, *, model: str = "policy", deadline: float | None = None
    ) -> Operation[Done]:
        """Sets the reference policy: "base", "current" or a snapshot's name.

        `.result()` raises `InvalidRequestError`, with the nearest name, where there is none of it.
        """
        operation: Operation[Done] = self._submit(
            "set_reference", SetReference(source=source, model=model), deadline=deadline
        )
        return operation

    def save(
        self,
        name: str,
        metadata: Mapping[str, Any] | None = None,
        optimizer: bool = True,
        *,
        model: str = "policy",
        deadline: float | None = None,
    ) -> Operation[CheckpointInfo]:
        """Writes a checkpoint; refused where the name exists or a gradient is accumulated.

        metadata: JSON values of the caller's, returned by `load` and `checkpoints`.
        `.result()` raises `ConflictError` where the name is taken or a gradient was not applied,
        `DirtyGradientsError` after a forward_backward failed, and `InvalidRequestError` where the
        run has no checkpoint_dir.
        """
        request = Save(name=name, metadata=metadata, optimizer=optimizer, model=model)
        operation: Operation[CheckpointInfo] = self._submit("save", request, deadline=deadline)
        return operation

    def load(
        self,
        name: str,
        optimizer: bool = True,
        *,
        model: str = "policy",
        deadline: float | None = None,
    ) -> Operation[LoadResult]:
        """Restores a checkpoint; with optimizer=False the optimizer is fresh afterwards.

        `.result()` raises `InvalidRequestError` where there is no such checkpoint, where it is of
        another model, or where it holds no optimizer state; `ConflictError` where it is damaged.
        """
        operation: Operation[LoadResult] = self._submit(
            "load", Load(name=name, optimizer=optimizer, model=model), deadline=deadline
        )
        return operation

    def checkpoints(
        self, *, model: str = "policy", deadline: float | None = None
    ) -> Operation[tuple[CheckpointInfo, ...]]:
        """The run's checkpoints, oldest first."""

        def convert(listed: CheckpointList) -> tuple[CheckpointInfo, ...]:
            return listed.checkpoints

        operation: Operation[tuple[CheckpointInfo, ...]] = self._submit(
            "checkpoints", Checkpoints(model=model), convert, deadline
        )
        return operation

    def delete(
        self,
        name: str,
        kind: FileKind = "checkpoint",
        *,
        model: str = "policy",
        deadline: float | None = None,
    ) -> Operation[Done]:
        """Removes a checkpoint, or with kind="export" an export.

        `.result()` raises `InvalidRequestError`, with the nearest name, where there is none of it.
        """
        operation: Operation[Done] = self._submit(
            "delete", Delete(name=name, kind=kind, model=model), deadline=deadline
        )
        return operation

    def export(
        self, name: str, *, model: str = "policy", deadline: float | None = None
    ) -> Operation[ExportReceipt]:
        """Writes the current weights as a Hugging Face directory on the backend's side; fetch it
        with `Session.download("export", name, destination)`, remove it with `delete`.

        `.result()` raises `ConflictError` where the name is taken, and `InvalidRequestError` where
        the run has no checkpoint_dir.
        """
        operation: Operation[ExportReceipt] = self._submit(
            "export", Export(name=name, model=model), deadline=deadline
        )
        return operation


def _checked_batch(batch: Batch) -> Batch:
    if not isinstance(batch, Batch):
        raise InvalidRequestError(
            f"batch must be a remote_rl.Batch, not a {type(batch).__name__}; build one with "
            "Batch(...) or Batch.from_groups(...)",
            field="batch",
        )
    return batch


def raise_only_custom() -> None:
    """`outputs` is for losses that run on the client."""
    raise InvalidRequestError(
        "outputs= is only for losses of losses.custom; this one is computed by the backend"
    )
