"""Contract: what training and weight operations take and return (imports numpy, attrs, errors,
fields, ragged, work)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from ..errors import InvalidRequestError, UnknownNameError, nearest
from .arrays import Array, to_numpy
from .fields import (
    LOCAL,
    SEMANTIC,
    as_tuple,
    each,
    flag,
    instance_of,
    integer,
    label,
    number,
    optional,
    plain,
    strict,
    text,
)
from .generation import Label
from .ragged import Ragged
from .result_fields import (
    as_float,
    metadata_field,
    metrics_field,
    named,
    real,
    size_field,
    version_field,
)
from .work import Work

#: dtype tag -> (numpy dtype that holds the raw bytes, bytes an element)
TENSOR_DTYPES: Mapping[str, str] = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "float8_e4m3fn": "|u1",
    "float8_e5m2": "|u1",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "|i1",
    "uint8": "|u1",
    "bool": "|b1",
}


def _betas(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    good = (
        isinstance(value, tuple)
        and len(value) == 2
        and all(
            isinstance(beta, (int, float)) and not isinstance(beta, bool) and 0 <= beta < 1
            for beta in value
        )
    )
    if not good:
        raise InvalidRequestError(
            f"AdamW.betas must be two numbers in [0, 1), not {value!r}", field="betas"
        )


@strict
@attrs.frozen(kw_only=True)
class AdamW:
    """One step of AdamW (Loshchilov & Hutter, arXiv:1711.05101), with torch.optim.AdamW's names,
    defaults and formula; every knob may differ from step to step.

    lr: step size. betas: decay of the first and second moment, each in [0, 1). eps: added to the
    root of the second moment. weight_decay: decoupled, times lr.
    max_grad_norm: the accumulated gradient is scaled so that its 2-norm is at most this; None
    never clips. A non-finite gradient skips the step and leaves weights and moments untouched.
    """

    lr: float = attrs.field(metadata=SEMANTIC, converter=plain, validator=number(minimum=0))
    betas: tuple[float, float] = attrs.field(
        default=(0.9, 0.999), metadata=SEMANTIC, converter=as_tuple, validator=_betas
    )
    eps: float = attrs.field(
        default=1e-8, metadata=SEMANTIC, converter=plain, validator=number(minimum=0)
    )
    weight_decay: float = attrs.field(
        default=0.01, metadata=SEMANTIC, converter=plain, validator=number(minimum=0)
    )
    max_grad_norm: float | None = attrs.field(
        default=None, metadata=SEMANTIC, converter=plain, validator=optional(number(above=0))
    )


def _columns(values: Any) -> Mapping[str, Ragged]:
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise InvalidRequestError(
            f"Outputs.values must be a mapping of names to rows, not {type(values).__name__}",
            field="values",
        )
    return {
        name: Ragged.of(rows, np.float32, f"Outputs.values[{name!r}]")
        for name, rows in values.items()
    }


@strict
@attrs.frozen(kw_only=True)
class Outputs:
    """What a forward computed, entry t for response token t.

    values: name ("logprobs", "entropy", ...) to Ragged[n] float32; each name is an attribute too.
    version: of the weights that computed them. metrics: the backend's own, by name. work: what was
    computed for them, None where the backend doesn't count.
    computed_for: what they were computed for (tokens, temperatures, policy), as a digest that the
    client adds; never sent.
    """

    values: Mapping[str, Ragged] = attrs.field(converter=_columns)
    version: int = version_field()
    metrics: Mapping[str, float] = metrics_field()
    work: Work | None = attrs.field(default=None, validator=optional(instance_of(Work)))
    computed_for: str | None = attrs.field(default=None, metadata=LOCAL, repr=False)

    def __getattr__(self, name: str) -> Ragged:
        if name.startswith("_"):  # pickle and copy probe for hooks on an instance not yet filled
            raise AttributeError(name)
        if name not in self.values:
            raise UnknownNameError(
                f"this forward returned no {name!r}; {nearest(name, self.values)}", field=name
            )
        return self.values[name]

    def __getitem__(self, name: str) -> Ragged:
        return self.values[name]


@strict
@attrs.frozen(kw_only=True)
class ForwardBackwardResult:
    """value: the loss over the whole batch. metrics: by name. version: of the weights used. work:
    what was computed, forward and backward, and the forward that a custom loss needed before; None
    where the backend doesn't count."""

    value: float = attrs.field(converter=as_float, validator=real())
    metrics: Mapping[str, float] = metrics_field()
    version: int = version_field()
    work: Work | None = attrs.field(default=None, validator=optional(instance_of(Work)))


@strict
@attrs.frozen(kw_only=True)
class OptimStepResult:
    """grad_norm: 2-norm of the accumulated gradient before clipping (NaN or inf where the step was
    skipped). skipped: the gradient, or the update it led to, was not finite; weights and moments
    are untouched. version: of the weights afterwards.
    metrics: the backend's own, by name. work: the seconds that it took, of no tokens and no model
    FLOPs; None where the backend doesn't count."""

    grad_norm: float = attrs.field(converter=as_float, validator=real())
    skipped: bool = attrs.field(validator=flag())
    version: int = version_field()
    metrics: Mapping[str, float] = metrics_field()
    work: Work | None = attrs.field(default=None, validator=optional(instance_of(Work)))


@strict
@attrs.frozen(kw_only=True)
class Done:
    """An operation without a result of its own. version: of the trainer's weights afterwards."""

    version: int = version_field()


@strict
@attrs.frozen(kw_only=True)
class CheckpointInfo:
    """One saved checkpoint. name: as it was saved under. created: seconds since 1970, UTC.
    bytes: on disk. metadata: the caller's. version: of the weights inside. optimizer: whether its
    state is inside. reference: whether a reference other than the base is inside."""

    name: str = attrs.field(validator=text())
    version: int = version_field()
    optimizer: bool = attrs.field(validator=flag())
    reference: bool = attrs.field(default=False, validator=flag())
    metadata: Mapping[str, Any] = metadata_field()
    created: float = attrs.field(default=0.0, converter=as_float, validator=number(minimum=0))
    bytes: int = size_field(default=0)


@strict
@attrs.frozen(kw_only=True)
class LoadResult:
    """name and metadata of what was loaded; version: max(current, saved) + 1; saved_version: the
    version it had when it was saved; optimizer: whether the optimizer's state was restored."""

    name: str = attrs.field(validator=text())
    metadata: Mapping[str, Any] = metadata_field()
    version: int = version_field()
    saved_version: int = version_field()
    optimizer: bool = attrs.field(validator=flag())


@strict
@attrs.frozen(kw_only=True)
class ExportReceipt:
    """A Hugging Face directory on the backend's side. name: as asked for. path: there. files:
    names inside. bytes: of all files. version: of the weights inside."""

    name: str = attrs.field(validator=text())
    path: str = attrs.field(validator=text())
    files: tuple[str, ...] = attrs.field(converter=as_tuple, validator=each(text()))
    bytes: int = size_field()
    version: int = version_field()


@strict
@attrs.frozen(kw_only=True)
class SyncReceipt:
    """Proof of a delivery of weights to the sampler.

    version, label: what the sampler serves from now on. tensors, bytes, seconds: what moved, how
    long it took. source_fingerprint, sampler_fingerprint: of names, shapes and dtypes as sent and
    as held by the sampler afterwards; they are equal, or the operation would have failed.
    """

    version: int = version_field()
    label: Label = attrs.field(default=None, converter=plain, validator=label())
    tensors: int = size_field()
    bytes: int = size_field()
    seconds: float = attrs.field(converter=as_float, validator=number(minimum=0))
    source_fingerprint: str = attrs.field(validator=text())
    sampler_fingerprint: str = attrs.field(validator=text())


@strict
@attrs.frozen(kw_only=True)
class WeightsVersion:
    """trainer: version of the trainer's weights. sampler: of those the sampler serves, None where
    a failed sync left it unknown. label: of the last delivery."""

    trainer: int = version_field()
    sampler: int | None = attrs.field(
        default=None, converter=plain, validator=optional(integer(minimum=0))
    )
    label: Label = attrs.field(default=None, converter=plain, validator=label())


@strict
@attrs.frozen(kw_only=True)
class TokenizerFiles:
    """What a client needs to load the tokenizer: `kind` is "bytes" for the built-in byte tokenizer
    or "huggingface" for `files` (name to contents, [size] uint8) of a tokenizer directory."""

    kind: str = attrs.field(validator=text())
    files: Mapping[str, Any] = attrs.field(factory=dict, validator=named())
    options: Mapping[str, Any] = attrs.field(factory=dict, validator=named())


@strict
@attrs.frozen(kw_only=True, eq=False, repr=False)
class Tensor:
    """A named tensor's raw contents, for dtypes numpy lacks as well.

    data: contiguous, any shape; for "bfloat16" a uint16 array of the bits, for "float8_*" uint8.
    dtype: a tag of TENSOR_DTYPES; taken from a numpy array or torch tensor by `Tensor.of`.
    """

    data: Array = attrs.field(metadata=SEMANTIC, converter=to_numpy)
    dtype: str = attrs.field(metadata=SEMANTIC, converter=str)

    def __attrs_post_init__(self) -> None:
        if self.dtype not in TENSOR_DTYPES:
            raise InvalidRequestError(
                f"Tensor.dtype can't be {self.dtype!r}; {nearest(self.dtype, TENSOR_DTYPES)}"
            )
        if self.data.dtype != np.dtype(TENSOR_DTYPES[self.dtype]):
            raise InvalidRequestError(
                f"a {self.dtype} Tensor holds {TENSOR_DTYPES[self.dtype]} data, "
                f"not {self.data.dtype}"
            )

    @classmethod
    def of(cls, value: Any) -> Tensor:
        """From a Tensor, a numpy array or a torch tensor of any dtype of TENSOR_DTYPES."""
        if isinstance(value, Tensor):
            return value
        if hasattr(value, "detach"):
            import torch

            held = value.detach().cpu().contiguous()
            tag = str(held.dtype).removeprefix("torch.")
            if tag == "bfloat16":
                return cls(data=held.view(torch.uint16).numpy(), dtype=tag)
            if tag.startswith("float8"):
                return cls(data=held.view(torch.uint8).numpy(), dtype=tag)
            return cls(data=held.numpy(), dtype=tag)
        array = np.asarray(to_numpy(value), order="C")
        if array.dtype.name not in TENSOR_DTYPES:
            raise InvalidRequestError(
                f"a tensor of dtype {array.dtype} can't be pushed; "
                f"cast it to one of {', '.join(TENSOR_DTYPES)}"
            )
        return cls(data=array, dtype=array.dtype.name)

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self.data.shape

    @property
    def nbytes(self) -> int:
        """Bytes of its contents."""
        return self.data.nbytes

    def __repr__(self) -> str:
        return f"Tensor({self.dtype}, {list(self.shape)})"
