"""Losses: what every loss specification offers (imports attrs, numpy, remote_rl.errors, types)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

import attrs
import numpy as np

from ..errors import InvalidRequestError
from ..types.fields import number, plain

if TYPE_CHECKING:
    from ..types import Batch

#: an array of numpy, torch or another namespace that array-api-compat knows
Array: TypeAlias = Any

#: lower and upper bound of a log ratio; None leaves that side open
Bounds: TypeAlias = tuple[float | None, float | None]

_WHERE_FROM: Mapping[str, str] = {
    "advantages": "Batch.from_groups(groups, advantages=...)",
    "old_logprobs": "training.forward at the weights before the update, or the sampler's logprobs",
    "ref_logprobs": 'training.forward(batch, policy="reference")',
}


@attrs.frozen(kw_only=True)
class Loss:
    """Base of every loss. A loss is data: frozen, compared by value, the same on every backend.

    name: how it is called on the wire and in capabilities.
    required_fields: names of the per-token Batch fields it needs, beside the mask.
    optional_fields: names of those it also reads where they are there.
    required_outputs: names of the model's outputs it is a function of.
    """

    name: ClassVar[str] = ""

    @property
    def required_fields(self) -> frozenset[str]:
        """Names of the Batch fields that must be there."""
        return frozenset()

    @property
    def optional_fields(self) -> frozenset[str]:
        """Names of the Batch fields that it also reads where they are there."""
        return frozenset()

    @property
    def required_outputs(self) -> frozenset[str]:
        """Names of the outputs that a forward must compute."""
        return frozenset({"logprobs"})

    def check(self, batch: Batch) -> None:
        """Refuses, by name, the first field that this loss needs and `batch` lacks."""
        for name in sorted(self.required_fields):
            if getattr(batch, name) is None:
                source = _WHERE_FROM.get(name)
                hint = f"Batch.{name}" + (f" (from {source})" if source else "")
                raise InvalidRequestError(
                    f"{type(self).__name__} needs Batch.{name}, which is None; set {hint}",
                    field=name,
                )

    def select(self, rows: Any) -> Self:
        """The loss for these rows of its batch; differs from the loss itself only where the loss
        holds values of its own for each token (`Cotangents`)."""
        return self

    def resolved(self, tokens: int, sequences: int) -> Self:
        """The loss with every open denominator filled in from a whole batch's counts."""
        return self


def as_bounds(value: float | Bounds | None) -> Bounds | None:
    """Converter: a number c to (-c, c), a pair to a tuple; None stays None."""
    given: Any = plain(value)
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return (-given, given)
    if isinstance(given, (list, tuple, np.ndarray)):
        given = tuple(map(plain, given))
    bounds: Bounds | None = given
    return bounds  # whatever else it is, check_bounds refuses it


def check_bounds(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Validator: None, or (low, high) with low < high, either of them None."""
    if value is None:
        return
    pair = isinstance(value, tuple) and len(value) == 2
    if pair:
        for bound in value:
            if bound is not None:
                number()(instance, attribute, bound)
    if not pair or (None not in value and value[0] >= value[1]):
        raise InvalidRequestError(
            f"{type(instance).__name__}.{attribute.name} must be None, a number c > 0 for (-c, c), "
            f"or a pair (low, high) with low < high, not {value!r}",
            field=attribute.name,
        )
