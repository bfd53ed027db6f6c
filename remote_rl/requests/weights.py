"""Contract: requests of the weights face (imports the contract's types and losses)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from ..errors import InvalidRequestError
from ..types.fields import (
    SEMANTIC,
    label,
    one_of,
    plain,
    strict,
)
from ..types.generation import Label
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


def _tensors(data: Any) -> Mapping[str, Tensor]:
    if not isinstance(data, Mapping) or not data:
        raise InvalidRequestError("push needs a mapping of names to tensors", field="tensors")
    return {str(name): Tensor.of(tensor) for name, tensor in data.items()}


@strict
@attrs.frozen(kw_only=True)
class Push(Request):
    """Carries a client's own tensors to the sampler: every tensor of the model, by name."""

    tensors: Mapping[str, Tensor] = attrs.field(metadata=SEMANTIC, converter=_tensors)
    in_flight: InFlight = attrs.field(
        default="keep", metadata=SEMANTIC, validator=one_of(("keep", "wait", "abort"))
    )
    label: Label = attrs.field(default=None, metadata=SEMANTIC, converter=plain, validator=label())
    model: str = model_field()

    def requirements(self) -> Iterator[Requirement]:
        yield ("in_flight", self.in_flight)
        yield from (
            ("push_dtype", dtype)
            for dtype in sorted({tensor.dtype for tensor in self.tensors.values()})
        )


@strict
@attrs.frozen(kw_only=True)
class Version(Request):
    """Asks which versions trainer and sampler hold."""

    model: str = model_field()
