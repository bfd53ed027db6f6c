"""Losses: a loss in the user's own code, run on the client (imports numpy, attrs, remote_rl.errors,
types; torch only when a torch function is run)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs
import numpy as np

from ..errors import InvalidRequestError
from ..types import Ragged
from ..types.fields import as_names, one_of, strict
from .base import Loss
from .cotangents import Cotangents

if TYPE_CHECKING:
    from ..types import Batch, Outputs

Framework = Literal["torch"]


@strict
@attrs.frozen(kw_only=True)
class Custom(Loss):
    """A function of the outputs that the client runs: forward, function, then `Cotangents`.

    function, outputs, framework: see `custom`, which builds it.
    """

    name: ClassVar[str] = "custom"

    function: Callable[..., Any]
    outputs: frozenset[str] = attrs.field(default=frozenset({"logprobs"}), converter=as_names)
    framework: Framework | None = attrs.field(default="torch", validator=one_of(("torch", None)))

    def __attrs_post_init__(self) -> None:
        names: Any = self.outputs
        if not callable(self.function):
            raise InvalidRequestError(
                f"losses.custom takes a function (batch, outputs), not {self.function!r}",
                field="function",
            )
        if not names or not all(isinstance(name, str) for name in names):
            raise InvalidRequestError(
                'Custom.outputs must name at least one output, such as {"logprobs"}',
                field="outputs",
            )

    @property
    def required_outputs(self) -> frozenset[str]:
        """The outputs that the function takes."""
        return self.outputs


def custom(
    function: Callable[..., Any],
    outputs: Iterable[str] | str = frozenset({"logprobs"}),
    framework: Framework | None = "torch",
) -> Custom:
    """A loss of your own, any function of the response tokens' outputs.

    framework "torch": function(batch, outputs) is given each named output as a one-dimensional
    float32 tensor over all response tokens, row after row, that requires grad (rows as in
    `batch.responses.offsets`), and returns a scalar tensor, or (scalar, metrics).
    framework None: each output is a read-only numpy array of that layout, and the function returns
    (value, {name: cotangent array}) or (value, cotangents, metrics).
    metrics: a mapping of names to numbers.
    """
    return Custom(function=function, outputs=outputs, framework=framework)


def run_custom(
    loss: Custom, batch: Batch, outputs: Outputs
) -> tuple[float, Cotangents, dict[str, float]]:
    """Runs the function on what a forward returned: value, cotangents, metrics.

    The cotangents carry `outputs.version`; an output the value does not depend on gets zeros.
    Raises `InvalidRequestError` where the result is not a finite scalar, depends on no output, or
    a cotangent is NaN (naming the row).
    """
    arrays = {name: _flat(name, batch, outputs) for name in sorted(loss.outputs)}
    run = _run_torch if loss.framework == "torch" else _run_plain
    value, slopes, metrics = run(loss.function, batch, arrays)
    if not math.isfinite(value):
        raise InvalidRequestError(
            f"the custom loss is {value}; nothing was sent, so no gradient changed"
        )
    rows = {name: Ragged(slope, batch.responses.offsets) for name, slope in slopes.items()}
    return value, Cotangents(rows, version=outputs.version), _numbers(metrics)


def _flat(name: str, batch: Batch, outputs: Outputs) -> np.ndarray[Any, Any]:
    rows = outputs[name] if name in outputs.values else getattr(outputs, name)
    if not np.array_equal(rows.offsets, batch.responses.offsets):
        raise InvalidRequestError(
            f"the output {name!r} has other rows than the batch's responses; take it from a "
            "forward of this batch",
            field=name,
        )
    return np.asarray(rows.values, dtype=np.float32)


def _run_torch(
    function: Callable[..., Any], batch: Batch, arrays: Mapping[str, Any]
) -> tuple[float, dict[str, Any], Any]:
    import torch

    with torch.inference_mode(mode=False), torch.enable_grad():
        leaves = {
            name: torch.tensor(array, dtype=torch.float32, requires_grad=True)
            for name, array in arrays.items()
        }
        result = function(batch, dict(leaves))
        value, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            shape = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else value
            raise InvalidRequestError(
                f"the custom loss must return a scalar torch tensor, or (scalar, metrics), not "
                f"{shape!r}; reduce it with sum() or mean()"
            )
        if not value.requires_grad:
            raise InvalidRequestError(
                f"the custom loss does not depend on any of its outputs {sorted(leaves)}, so it "
                "has no gradient; look for detach(), item() or no_grad() in it"
            )
        grads: Sequence[Any] = torch.autograd.grad(
            value.reshape(()), list(leaves.values()), allow_unused=True
        )
    slopes = {
        name: np.zeros(len(arrays[name]), np.float32)
        if grad is None
        else np.ascontiguousarray(grad.numpy())
        for name, grad in zip(leaves, grads, strict=True)
    }
    return float(value.detach()), slopes, metrics


def _run_plain(
    function: Callable[..., Any], batch: Batch, arrays: Mapping[str, Any]
) -> tuple[float, dict[str, Any], Any]:
    views = {}
    for name, array in arrays.items():
        views[name] = array.view()
        views[name].flags.writeable = False
    result = function(batch, views)
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise InvalidRequestError(
            "a custom loss without a framework must return (value, cotangents) or (value, "
            f"cotangents, metrics), not {type(result).__name__}"
        )
    value, given = result[0], result[1]
    if np.ndim(value) != 0 or not isinstance(given, Mapping):
        raise InvalidRequestError(
            "a custom loss without a framework must return a number and a mapping of output names "
            f"to cotangent arrays, not {type(value).__name__} and {type(given).__name__}"
        )
    unknown = sorted(set(given) - set(arrays))
    if unknown:
        raise InvalidRequestError(
            f"the custom loss returned a cotangent for {unknown[0]!r}, but its outputs are "
            f"{sorted(arrays)}; name it in losses.custom(..., outputs=...)",
            field=unknown[0],
        )
    slopes = {name: _cotangent(name, given.get(name), len(arrays[name])) for name in arrays}
    return float(value), slopes, result[2] if len(result) == 3 else {}


def _cotangent(name: str, given: Any, total: int) -> np.ndarray[Any, Any]:
    if given is None:
        return np.zeros(total, np.float32)
    array = np.asarray(given, dtype=np.float32)
    if array.shape != (total,):
        raise InvalidRequestError(
            f"the custom loss returned a cotangent of shape {array.shape} for {name!r}; it has "
            f"{total} response tokens, so it must be ({total},)",
            field=name,
        )
    return array


def _numbers(metrics: Any) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        raise InvalidRequestError(
            f"the custom loss's metrics must map names to numbers, not {type(metrics).__name__}"
        )
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[str(name)] = float(value.detach() if hasattr(value, "detach") else value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidRequestError(
                f"the custom loss's metric {name!r} is not a number: {type(value).__name__}",
                field=str(name),
            ) from error
    return numbers
