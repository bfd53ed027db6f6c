"""Contract: requests of the weights face (imports the contract's types and losses)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from ..errors import InvalidRequestError
from ..types.fields import (
    SEMANTIC,
    Validator,
    label,
    one_of,
    optional,
    plain,
    refuse,
    strict,
    text,
)
from ..types.generation import Label
from ..types.pieces import Piece, TensorForm
from ..types.results import Tensor
from .base import InFlight, Request, Requirement, model_field


@strict
@attrs.frozen(kw_only=True)
class Sync(Request):
    """Carries the trainer's weights to the sampler.

    in_flight: what happens to running generates: "keep" (go on with the new weights), "wait"
    (finish first), "abort". label: a framework's own step, passed on to samples.
    """

    in_flight: InFlight = attrs.field(
        default="keep", metadata=SEMANTIC, validator=one_of(("keep", "wait", "abort"))
    )
    label: Label = attrs.field(default=None, metadata=SEMANTIC, converter=plain, validator=label())
    model: str = model_field()

    def requirements(self) -> Iterator[Requirement]:
        yield ("in_flight", self.in_flight)


def _tensors(data: Any) -> Mapping[str, Tensor] | None:
    if data is None:
        return None
    if not isinstance(data, Mapping) or not data:
        raise InvalidRequestError("push needs a mapping of names to tensors", field="tensors")
    return {str(name): Tensor.of(tensor) for name, tensor in data.items()}


@strict
@attrs.frozen(kw_only=True)
class Push(Request):
    """Carries a client's own tensors to the sampler: every tensor of the model, by name.

    tensors: these, in this message. transfer: instead of them, the transfer whose parts have
    brought them.
    """

    tensors: Mapping[str, Tensor] | None = attrs.field(
        default=None, metadata=SEMANTIC, converter=_tensors
    )
    in_flight: InFlight = attrs.field(
        default="keep", metadata=SEMANTIC, validator=one_of(("keep", "wait", "abort"))
    )
    label: Label = attrs.field(default=None, metadata=SEMANTIC, converter=plain, validator=label())
    transfer: str | None = attrs.field(default=None, metadata=SEMANTIC, validator=optional(text()))
    model: str = model_field()

    def __attrs_post_init__(self) -> None:
        if (self.tensors is None) == (self.transfer is None):
            raise InvalidRequestError(
                "push needs tensors, or the transfer that has brought them, and not both",
                field="tensors",
            )

    def requirements(self) -> Iterator[Requirement]:
        if self.transfer is not None:
            yield ("operation", "push_part")
        yield ("in_flight", self.in_flight)
        yield from _dtypes(self.tensors or {})


def _named(kind: type) -> Validator:
    """A mapping of names to objects of this class."""

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not isinstance(value, Mapping) or not all(
            isinstance(name, str) and isinstance(item, kind) for name, item in value.items()
        ):
            refuse(instance, attribute, value, f"a mapping of names to {kind.__name__}")

    return check


@strict
@attrs.frozen(kw_only=True)
class PushPart(Request):
    """Carries a part of a push that is too large for one message; the sampler keeps its weights
    until the push that names the transfer.

    transfer: the client's own name for all the parts of one push. forms: what every tensor of the
    push is, by name, in the first part. pieces: of tensors, by name, in each of the others; those
    of one tensor come in order.
    """

    transfer: str = attrs.field(metadata=SEMANTIC, validator=text())
    forms: Mapping[str, TensorForm] = attrs.field(
        factory=dict, metadata=SEMANTIC, validator=_named(TensorForm)
    )
    pieces: Mapping[str, Piece] = attrs.field(
        factory=dict, metadata=SEMANTIC, validator=_named(Piece)
    )
    model: str = model_field()

    def __attrs_post_init__(self) -> None:
        if bool(self.forms) == bool(self.pieces):
            raise InvalidRequestError(
                "push_part needs forms, of every tensor, or pieces of tensors, and not both",
                field="forms",
            )

    def requirements(self) -> Iterator[Requirement]:
        return _dtypes(self.forms)


def _dtypes(tensors: Mapping[str, Tensor] | Mapping[str, TensorForm]) -> Iterator[Requirement]:
    for dtype in sorted({tensor.dtype for tensor in tensors.values()}):
        yield ("push_dtype", dtype)


@strict
@attrs.frozen(kw_only=True)
class Version(Request):
    """Asks which versions trainer and sampler hold."""

    model: str = model_field()
