"""Contract: the typed data that every station passes on (imports numpy, attrs and errors only)."""

from .batch import Batch
from .generation import (
    FINISH_REASONS,
    FinishReason,
    Generation,
    Group,
    Label,
    Sample,
)
from .ragged import Ragged, RaggedLike
from .results import (
    AdamW,
    CheckpointInfo,
    Done,
    ExportReceipt,
    ForwardBackwardResult,
    LoadResult,
    OptimStepResult,
    Outputs,
    SyncReceipt,
    Tensor,
    WeightsVersion,
)
from .sampling import SamplingParams

__all__ = [
    "FINISH_REASONS",
    "AdamW",
    "Batch",
    "CheckpointInfo",
    "Done",
    "ExportReceipt",
    "FinishReason",
    "ForwardBackwardResult",
    "Generation",
    "Group",
    "Label",
    "LoadResult",
    "OptimStepResult",
    "Outputs",
    "Ragged",
    "RaggedLike",
    "Sample",
    "SamplingParams",
    "SyncReceipt",
    "Tensor",
    "WeightsVersion",
]
