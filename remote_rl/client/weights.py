"""Client: the weights face (imports the contract, faces and pushes)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..requests import InFlight, Push, Sync, Version
from ..types.generation import Label
from ..types.results import SyncReceipt, WeightsVersion
from .faces import Face
from .operation import Operation
from .pushes import new_transfer, plan_of, submit_parts


class Weights(Face):
    """The path of weights to the sampler; its operations are in order with those of training."""

    def sync(
        self,
        in_flight: InFlight = "keep",
        label: Label = None,
        *,
        model: str = "policy",
        deadline: float | None = None,
    ) -> Operation[SyncReceipt]:
        """Carries the trainer's weights to the sampler.

        in_flight: running generates go on with the new weights ("keep"), finish first ("wait") or
        end ("abort"). label: passed on to samples. A generate submitted after the receipt uses at
        least its version.
        `.result()` raises `DirtyGradientsError` after a forward_backward failed, `ConflictError`
        where "wait" would wait for paused generates or pushed weights are newer than the trainer's,
        and `BackendError` where the sampler holds other tensors than were sent.
        """
        operation: Operation[SyncReceipt] = self._submit(
            "sync", Sync(in_flight=in_flight, label=label, model=model), deadline=deadline
        )
        return operation

    def push(
        self,
        tensors: Mapping[str, Any],
        in_flight: InFlight = "keep",
        label: Label = None,
        *,
        part_bytes: int | None = None,
        model: str = "policy",
        deadline: float | None = None,
    ) -> Operation[SyncReceipt]:
        """Carries tensors of this process to the sampler, for a trainer that is local.

        tensors: every tensor of the model by name, each a numpy array, torch tensor or `Tensor`;
        missing, extra and misshaped ones are refused before anything changes, by an
        `InvalidRequestError` from `.result()`; a dtype that the backend does not take is an
        `UnsupportedError` at the call. Its other errors are those of `sync`.
        part_bytes: tensors of more bytes go in several messages of so many each (64 MiB), two at a
        time, so that nobody holds a copy of all of them on the way; the sampler changes once, at
        the end, to the same bits. A part that fails fails the push, and nothing has changed. What
        is called after the push runs after it. Where the backend takes no parts the default is one
        message, and a number of bytes that would need several an `UnsupportedError`.
        """
        plan = plan_of(self, tensors, part_bytes)
        if plan is None:
            request = Push(tensors=tensors, in_flight=in_flight, label=label, model=model)
            operation: Operation[SyncReceipt] = self._submit("push", request, deadline=deadline)
            return operation
        push = Push(transfer=new_transfer(), in_flight=in_flight, label=label, model=model)
        return submit_parts(self, plan, push, deadline)

    def version(self, *, model: str = "policy") -> Operation[WeightsVersion]:
        """Which versions trainer and sampler hold, after all that was submitted before."""
        operation: Operation[WeightsVersion] = self._submit("version", Version(model=model))
        return operation
