"""Mock backend: the path of weights to the sampler (imports the sampler, the trainer, staging, the
model's types, and the contract)."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping

import numpy as np

from remote_rl.errors import BackendError, InvalidRequestError, nearest
from remote_rl.protocol import OperationContext
from remote_rl.requests import Push, PushPart, Sync
from remote_rl.types import Label, SyncReceipt, Tensor

from .generation import Served
from .journal import Journal
from .model import Floats, Weights, frozen
from .sampler import Sampler
from .staging import Staging
from .trainer import Trainer

#: what the trainer's own weights are
TRAINER_DTYPE = "float64"


def fingerprint(shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]) -> str:
    """Hexadecimal SHA-256 of names, shapes and dtype tags, whatever their order."""
    rows = [[name, dtypes[name], list(shapes[name])] for name in sorted(shapes)]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def decoded(tensor: Tensor) -> Floats:
    """The tensor's values in float64, each exactly what its bits say.

    "float8_e4m3fn" and "float8_e5m2" as in "FP8 Formats for Deep Learning" (arXiv:2209.05433)."""
    data = tensor.data
    if tensor.dtype == "bfloat16":
        return _wide((data.astype(np.uint32) << 16).view(np.float32))
    if tensor.dtype == "float8_e5m2":
        return _wide((data.astype(np.uint16) << 8).view(np.float16))
    if tensor.dtype == "float8_e4m3fn":
        return _wide(_E4M3FN[data])
    return _wide(data)


def _wide(values: np.typing.NDArray[np.generic]) -> Floats:
    with np.errstate(invalid="ignore"):  # a signalling NaN is refused later, by name
        return values.astype(np.float64)


def _e4m3fn_table() -> Floats:
    # sign, four bits of exponent (bias 7), three of fraction; no infinity, all ones are NaN
    bits = np.arange(256)
    exponent, fraction = (bits >> 3) & 15, bits & 7
    normal = np.ldexp(1.0 + fraction / 8.0, exponent - 7)
    values = np.where(exponent == 0, np.ldexp(fraction / 8.0, -6), normal)
    values[(bits & 127) == 127] = np.nan
    return np.where(bits >= 128, -values, values)


_E4M3FN = _e4m3fn_table()


def check_shapes(shapes: Mapping[str, tuple[int, ...]], wanted: Weights) -> None:
    """Raises, by name, where a pushed tensor is missing, unknown or of another shape."""
    for name, shape in shapes.items():
        if name not in wanted:
            raise InvalidRequestError(
                f"the model has no tensor {name!r}; {nearest(name, wanted)}", field=name
            )
        if shape != wanted[name].shape:
            raise InvalidRequestError(
                f"tensor {name!r} has shape {list(shape)}; the model's has "
                f"{list(wanted[name].shape)}",
                field=name,
            )
    missing = sorted(set(wanted) - set(shapes))
    if missing:
        raise InvalidRequestError(
            f"push lacks {', '.join(map(repr, missing))}; it takes every tensor of the model",
            field=missing[0],
        )


def received(tensors: Mapping[str, Tensor], wanted: Weights) -> dict[str, Floats]:
    """Pushed tensors in float64. Raises, by name, where one is missing, unknown, of another shape,
    or holds what is no finite float64; nothing has changed then."""
    check_shapes({name: tensor.shape for name, tensor in tensors.items()}, wanted)
    arrays = {name: decoded(tensors[name]) for name in wanted}
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise InvalidRequestError(f"tensor {name!r} holds NaN or infinity", field=name)
        if tensors[name].data.dtype.kind in "iu" and tensors[name].dtype == "int64":
            limit = 2**53
            if (np.abs(array) > limit).any():
                raise InvalidRequestError(
                    f"tensor {name!r} holds whole numbers beyond 2**53, which the mock's float64 "
                    "can't hold exactly",
                    field=name,
                )
    return arrays


class WeightPath:
    """From the trainer, or a client, to the sampler; implements `protocol.WeightSync`."""

    def __init__(self, trainer: Trainer, sampler: Sampler, journal: Journal) -> None:
        self._trainer = trainer
        self._sampler = sampler
        self._journal = journal
        self.staging = Staging()

    async def sync(self, request: Sync, context: OperationContext) -> SyncReceipt:
        """Copies the trainer's weights; the sampler then serves their version."""
        async with self._journal.operation("sync", request, context):
            self.staging.drop()  # one set of weights on its way is enough
            begin = time.monotonic()
            policy = self._trainer.policy
            copies = await context.thread(_copied, policy.weights)
            dtypes = dict.fromkeys(copies, TRAINER_DTYPE)
            served = Served(copies, dtypes, policy.version, request.label)
            await self._sampler.deliver(served, request.in_flight, context)
            size = sum(array.nbytes for array in copies.values())
            source = fingerprint(_shapes(policy.weights), dtypes)
            return self._receipt(source, size, begin)

    async def push_part(self, request: PushPart, context: OperationContext) -> None:
        """Keeps the pieces; the forms, which come first, must be the model's."""
        async with self._journal.operation("push_part", request, context):
            if request.forms:
                self.staging.drop()
                shapes = {name: form.shape for name, form in request.forms.items()}
                check_shapes(shapes, self._trainer.policy.weights)
                self.staging.begin(request.forms)
            else:
                await context.thread(self.staging.write, request.pieces)

    async def push(self, request: Push, context: OperationContext) -> SyncReceipt:
        """Takes a client's tensors; the sampler then serves them as `context.next_version`."""
        async with self._journal.operation("push", request, context):
            begin = time.monotonic()
            staged = self.staging.take()
            tensors = staged if request.tensors is None else request.tensors
            arrays = await context.thread(received, tensors, self._trainer.policy.weights)
            dtypes = {name: tensors[name].dtype for name in arrays}
            served = Served(frozen(arrays), dtypes, context.next_version, request.label)
            await self._sampler.deliver(served, request.in_flight, context)
            size = sum(tensor.nbytes for tensor in tensors.values())
            shapes = {name: tensor.shape for name, tensor in tensors.items()}
            return self._receipt(fingerprint(shapes, dtypes), size, begin)

    def _receipt(self, source: str, size: int, begin: float) -> SyncReceipt:
        served = self._sampler.served
        held = fingerprint(_shapes(served.weights), served.dtypes)
        if held != source:
            raise BackendError(
                "the sampler holds tensors of other names, shapes or dtypes than were sent"
            )
        label: Label = served.label
        return SyncReceipt(
            version=served.version,
            label=label,
            tensors=len(served.weights),
            bytes=size,
            seconds=time.monotonic() - begin,
            source_fingerprint=source,
            sampler_fingerprint=held,
        )


def served_base(weights: Weights, version: int) -> Served:
    """What the sampler serves at the start and after a reset."""
    return Served(_copied(weights), dict.fromkeys(weights, TRAINER_DTYPE), version, None)


def _copied(weights: Weights) -> dict[str, Floats]:
    return frozen({name: array.copy() for name, array in weights.items()})


def _shapes(weights: Weights) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in weights.items()}
