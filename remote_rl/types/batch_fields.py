"""Contract: how a batch's fields are taken in and checked (imports numpy, errors, ragged)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from ..errors import InvalidRequestError
from .arrays import Array, TensorLike, cast_array, to_numpy
from .fields import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE, TEMPERATURES
from .ragged import Ragged, RaggedLike, highest_id

if TYPE_CHECKING:
    from .batch import Batch

#: one entry a response
ColumnLike: TypeAlias = "npt.ArrayLike | TensorLike"

PER_TOKEN_FLOATS = (
    "importance_weights",
    "advantages",
    "old_logprobs",
    "ref_logprobs",
    "sampling_logprobs",
)


#: those that may be given as one value a response
ONE_A_RESPONSE = ("importance_weights", "advantages")


# one converter a field, so that type checkers know what each takes and errors name it


def prompts(data: RaggedLike) -> Ragged:
    """Ragged int32."""
    return Ragged.of(data, np.int32, "Batch.prompts")


def responses(data: RaggedLike) -> Ragged:
    """Ragged int32."""
    return Ragged.of(data, np.int32, "Batch.responses")


def _column(data: ColumnLike, dtype: npt.DTypeLike, name: str) -> Array:
    what = f"Batch.{name}"
    return cast_array(to_numpy(data, what).reshape(-1), dtype, what)


def prompt_index(data: ColumnLike) -> Array:
    """[n] int32."""
    return _column(data, np.int32, "prompt_index")


def policy_version(data: ColumnLike | None) -> Array | None:
    """[n] int64 or None."""
    return None if data is None else _column(data, np.int64, "policy_version")


def temperature(data: ColumnLike) -> Array:
    """[n] or [1] float32."""
    return _column(data, np.float32, "temperature")


def mask(data: RaggedLike | None) -> Ragged:
    """Ragged uint8; None stays None until the batch fills in ones."""
    return cast(Ragged, None) if data is None else Ragged.of(data, np.uint8, "Batch.mask")


def _floats(data: RaggedLike | None, name: str) -> Ragged | None:
    return None if data is None else Ragged.of(data, np.float32, f"Batch.{name}")


def _floats_or_column(data: RaggedLike | ColumnLike | None, name: str) -> Ragged | None:
    """Rows, or one value a response, which stays an array until the batch spreads it."""
    given: Any = data
    if not isinstance(given, Ragged) and not getattr(given, "is_nested", False):
        given = given if hasattr(given, "ndim") or not _iterable(given) else list(given)
        if _one_a_row(given):
            return cast(Ragged, _column(given, np.float32, name))
    return _floats(given, name)


def importance_weights(data: RaggedLike | ColumnLike | None) -> Ragged | None:
    """Ragged float32, [n] float32 or None."""
    return _floats_or_column(data, "importance_weights")


def advantages(data: RaggedLike | ColumnLike | None) -> Ragged | None:
    """Ragged float32, [n] float32 or None."""
    return _floats_or_column(data, "advantages")


def old_logprobs(data: RaggedLike | None) -> Ragged | None:
    """Ragged float32 or None."""
    return _floats(data, "old_logprobs")


def ref_logprobs(data: RaggedLike | None) -> Ragged | None:
    """Ragged float32 or None."""
    return _floats(data, "ref_logprobs")


def sampling_logprobs(data: RaggedLike | None) -> Ragged | None:
    """Ragged float32 or None."""
    return _floats(data, "sampling_logprobs")


def check_rows(batch: Batch, rows: int) -> None:
    """Refuses columns and rows whose lengths disagree with the responses'."""
    for name in ("prompt_index", "temperature", "policy_version"):
        column = getattr(batch, name)
        if column is not None and len(column) != rows:
            raise InvalidRequestError(
                f"Batch.{name} has {len(column)} entries for {rows} responses", field=name
            )
    offsets = batch.responses.offsets
    for name in ("mask", *PER_TOKEN_FLOATS):
        field = getattr(batch, name)
        if field is None or field.offsets is offsets:
            continue
        if np.array_equal(field.offsets, offsets):
            # one array of offsets for all: it crosses the wire once
            object.__setattr__(batch, name, Ragged(field.values, offsets))
            continue
        if len(field) != rows:
            raise InvalidRequestError(
                f"Batch.{name} has {len(field)} rows for {rows} responses", field=name
            )
        row = int(np.argmax(field.lengths != batch.responses.lengths))
        raise InvalidRequestError(
            f"row {row} of Batch.{name} has {field.lengths[row]} entries for a response of "
            f"{batch.responses.lengths[row]} tokens",
            field=name,
            row=row,
        )
    index = batch.prompt_index
    outside = (index < 0) | (index >= len(batch.prompts))
    if outside.any():
        row = int(np.argmax(outside))
        raise InvalidRequestError(
            f"Batch.prompt_index[{row}] is {index[row]}, but there are {len(batch.prompts)} "
            "prompts",
            field="prompt_index",
            row=row,
        )


def check_values(batch: Batch) -> None:
    """Refuses what no batch may hold: NaN, negative ids, a mask other than 0 and 1."""
    for name in ("prompts", "responses"):
        ids: Ragged = getattr(batch, name)
        if highest_id(ids) >= 2**31:
            _refuse_token(name, ids, ids.values < 0, "is negative")
    if batch.mask.values.size and int(batch.mask.values.max()) > 1:
        _refuse_token("mask", batch.mask, batch.mask.values > 1, "is neither 0 nor 1")
    for name in PER_TOKEN_FLOATS:
        field: Ragged | None = getattr(batch, name)
        if field is None or _surely_finite(field.values):
            continue
        bad = ~np.isfinite(field.values)
        if bad.any():
            _refuse_token(name, field, bad, "is not finite")
    heat = batch.temperature
    bad = ~((heat == 0) | ((heat >= LOWEST_TEMPERATURE) & (heat <= HIGHEST_TEMPERATURE)))
    if bad.any():
        row = int(np.argmax(bad))
        raise InvalidRequestError(
            f"Batch.temperature[{row}] is {batch.temperature[row]}; it must be {TEMPERATURES}",
            field="temperature",
            row=row,
        )
    empty = batch.prompts.lengths == 0
    if empty.any():
        raise InvalidRequestError(
            f"prompt {int(np.argmax(empty))} is empty; a response needs at least one token "
            "before it",
            field="prompts",
            row=int(np.argmax(empty)),
        )


def _surely_finite(values: Array) -> bool:
    """False where one is NaN or infinite, and perhaps where they are beyond 1e15: the sum of
    squares is one pass without a temporary, at the speed of memory, and NaN and inf survive it."""
    with np.errstate(all="ignore"):
        return math.isfinite(np.dot(values, values))


def _refuse_token(name: str, field: Ragged, bad: Array, problem: str) -> None:
    position = int(np.argmax(bad))
    row = int(np.searchsorted(field.offsets, position, side="right") - 1)
    token = position - int(field.offsets[row])
    raise InvalidRequestError(
        f"token {token} of row {row} of Batch.{name} {problem}: {field.values[position]}",
        field=name,
        row=row,
        token=token,
    )


def checked_extras(extras: Mapping[str, Any], rows: int) -> dict[str, Array]:
    """The loop's own columns as arrays of one entry a response."""
    if not isinstance(extras, Mapping):
        raise InvalidRequestError(
            "Batch.extras must map names to arrays of one entry a row", field="extras"
        )
    columns = {}
    for name, column in extras.items():
        try:
            columns[name] = to_numpy(column)
        except InvalidRequestError as error:
            raise InvalidRequestError(
                f"Batch.extras[{name!r}] has entries of different lengths; give an array of "
                "dtype object",
                field="extras",
            ) from error
        if columns[name].ndim == 0 or len(columns[name]) != rows:
            raise InvalidRequestError(
                f"Batch.extras[{name!r}] must have one entry for each of {rows} responses, "
                f"not shape {columns[name].shape}",
                field="extras",
            )
    return columns


def spread(column: Array, responses: Ragged, name: str) -> Ragged:
    """Field `name`, given as one value a response, repeated over each response's tokens."""
    if len(column) != len(responses):
        raise InvalidRequestError(
            f"Batch.{name} has {len(column)} values for {len(responses)} responses; give one a "
            "response or one a token",
            field=name,
        )
    return responses.with_values(np.repeat(column, responses.lengths))


def _iterable(values: Any) -> bool:
    return isinstance(values, Iterable) and not isinstance(values, (str, bytes))


def _one_a_row(values: Any) -> bool:
    if hasattr(values, "ndim"):
        return bool(values.ndim == 1) and getattr(values.dtype, "kind", "f") != "O"
    # a tensor of no dimension has a length that it refuses to tell
    return isinstance(values, list) and all(
        row.ndim == 0 if hasattr(row, "ndim") else not hasattr(row, "__len__") for row in values
    )
