"""Losses: derivatives that the client computed itself (imports numpy, attrs, array-api-compat,
remote_rl.errors, remote_rl.types)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import numpy as np

from ..errors import InvalidRequestError
from ..types import Ragged
from ..types.fields import SEMANTIC, integer, plain, strict
from .base import Array, Loss

if TYPE_CHECKING:
    from ..types import Batch
    from .batch import LossBatch


def _as_values(values: Any) -> Any:
    if not isinstance(values, Mapping):
        return values
    return {
        name: Ragged.of(rows, dtype=np.float32, what=f"Cotangents.values[{name!r}]")
        for name, rows in values.items()
    }


@strict
@attrs.frozen
class Cotangents(Loss):
    """The derivative of a scalar with respect to each output, to be backpropagated as it is.

    values: output name ("logprobs", "entropy", ...) to Ragged[n] float32, entry t for response
    token t. No mask, weight or aggregation is applied: what must not count is 0 here.
    version: of the weights whose outputs they were taken at; at another one they are a
    `ConflictError`.
    """

    name: ClassVar[str] = "cotangents"

    values: Mapping[str, Ragged] = attrs.field(metadata=SEMANTIC, converter=_as_values)
    version: int = attrs.field(
        metadata=SEMANTIC, kw_only=True, converter=plain, validator=integer(minimum=0)
    )

    def __attrs_post_init__(self) -> None:
        values: Any = self.values
        if not isinstance(values, Mapping) or not values:
            raise InvalidRequestError(
                "Cotangents.values must map at least one output's name to its derivatives, such "
                'as {"logprobs": Ragged}',
                field="values",
            )
        first_name, first = next(iter(self.values.items()))
        for name, rows in self.values.items():
            if not np.array_equal(rows.offsets, first.offsets):
                raise InvalidRequestError(
                    f"the rows of Cotangents.values[{name!r}] and of [{first_name!r}] differ in "
                    "length; both have one entry for each response token",
                    field=name,
                )
            refuse_non_finite(name, rows)

    @property
    def required_outputs(self) -> frozenset[str]:
        """The outputs it holds derivatives for."""
        return frozenset(self.values)

    def check(self, batch: Batch) -> None:
        """Refuses a batch whose responses have other lengths."""
        _same_rows(next(iter(self.values.values())).offsets, batch.responses.offsets)

    def select(self, rows: Any) -> Cotangents:
        """The cotangents of these rows."""
        return attrs.evolve(
            self, values={name: each.select(rows) for name, each in self.values.items()}
        )


def apply(
    loss: Cotangents, batch: LossBatch, outputs: Mapping[str, Array]
) -> tuple[float, dict[str, Array]]:
    """The sum over outputs of cotangent x output (whose derivative the cotangents are), and the
    cotangents in each output's namespace, dtype and device."""
    from array_api_compat import array_namespace, device  # only where a backend applies them

    value, derivatives = 0.0, {}
    for name, rows in sorted(loss.values.items()):
        _same_rows(rows.offsets, batch.offsets)
        if name not in outputs:
            raise InvalidRequestError(
                f"Cotangents hold derivatives for {name!r}, which is not among the outputs "
                f"{sorted(outputs)}",
                field=name,
            )
        output = outputs[name].detach() if hasattr(outputs[name], "detach") else outputs[name]
        xp = array_namespace(output)
        slopes = xp.asarray(rows.values.copy(), dtype=output.dtype, device=device(output))
        zero = xp.zeros_like(output)
        products = xp.where(slopes != 0, slopes * output, zero)
        value += float(xp.sum(products, dtype=xp.float64))
        derivatives[name] = slopes
    return value, derivatives


def refuse_non_finite(name: str, rows: Ragged) -> None:
    """Refuses a NaN or infinite cotangent, naming row and token."""
    bad = ~np.isfinite(rows.values)
    if bad.any():
        position = int(np.argmax(bad))
        row = int(np.searchsorted(rows.offsets, position, side="right") - 1)
        token = position - int(rows.offsets[row])
        raise InvalidRequestError(
            f"the cotangent of {name!r} at token {token} of row {row} is {rows.values[position]}; "
            "it must be finite",
            field=name,
            row=row,
            token=token,
        )


def _same_rows(held: Any, wanted: Any) -> None:
    if np.array_equal(held, wanted):
        return
    if len(held) != len(wanted):
        raise InvalidRequestError(
            f"Cotangents hold {len(held) - 1} rows for {len(wanted) - 1} responses", field="values"
        )
    row = int(np.argmax(np.diff(held) != np.diff(wanted)))
    raise InvalidRequestError(
        f"row {row} of Cotangents has {held[row + 1] - held[row]} entries for a response of "
        f"{wanted[row + 1] - wanted[row]} tokens",
        field="values",
        row=row,
    )
