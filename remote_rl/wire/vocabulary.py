"""Wire: the fixed list of classes that may cross it (imports the contract's modules)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

from .. import losses, messages, ops, protocol, run_info
from ..types import batch, pieces, ragged, results, sampling, work


@functools.cache
def wire_classes() -> Mapping[str, type]:
    """Name to class: requests and responses of the table, messages, losses and what they hold."""
    classes: set[type] = {
        ragged.Ragged,
        batch.Batch,
        sampling.SamplingParams,
        results.AdamW,
        results.Tensor,
        pieces.TensorForm,
        pieces.Piece,
        results.CheckpointInfo,
        results.WeightsVersion,
        work.Work,
        work.Devices,
        protocol.Capabilities,
        protocol.ModelInfo,
        run_info.RunInfo,
        run_info.RunStatus,
        run_info.OperationStatus,
        run_info.FailureStatus,
        run_info.Distribution,
        *messages.MESSAGES,
        losses.Aggregation,
        losses.KL,
        losses.Entropy,
        *losses.LOSSES.values(),
    }
    for operation in ops.OPERATIONS.values():
        classes |= {operation.request, operation.response}
    return MappingProxyType({each.__name__: each for each in sorted(classes, key=str)})
