"""Mock backend: forward and backward of a whole batch (imports the model, and remote_rl's losses
and types)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from remote_rl.losses import Loss, LossBatch, LossValue, evaluate
from remote_rl.types import Batch

from .model import WINDOW, Floats, Weights, batch_windows, gradients, token_outputs

Rows: TypeAlias = npt.NDArray[np.int64]


def micro_batches(rows: int, size: int | None) -> Iterator[Rows | None]:
    """Row indices of consecutive pieces; None for the whole batch at once."""
    if size is None or size >= rows:
        return iter((None,))
    return (np.arange(start, min(start + size, rows)) for start in range(0, rows, size))


def outputs(weights: Weights, batch: Batch) -> dict[str, Floats]:
    """`logprobs` and `entropy` of each response token, [total] float64."""
    windows = batch_windows(batch, weights[WINDOW].shape[1])
    return token_outputs(weights, windows, batch.responses.values, _temperatures(batch))


def backward(weights: Weights, batch: Batch, loss: Loss) -> tuple[LossValue, dict[str, Floats]]:
    """A resolved loss on a batch, or a piece of it, and its derivative by each weight, float64."""
    windows = batch_windows(batch, weights[WINDOW].shape[1])
    tokens, temperatures = batch.responses.values, _temperatures(batch)
    held = token_outputs(weights, windows, tokens, temperatures)
    fields = LossBatch.from_batch(batch, lambda array: array, np.float64)
    value = evaluate(loss, fields, held)
    slopes = gradients(weights, windows, tokens, temperatures, value.derivatives)
    return value, slopes


def added(total: dict[str, Floats] | None, more: dict[str, Floats]) -> dict[str, Floats]:
    """The sum of two gradients, a new one; None is zero."""
    return more if total is None else {name: total[name] + more[name] for name in total}


def _temperatures(batch: Batch) -> Floats:
    result: Floats = np.repeat(batch.temperature.astype(np.float64), batch.responses.lengths)
    return result
