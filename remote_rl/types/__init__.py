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
from .pieces import Piece, TensorForm
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
from .work import Devices, Work, mfu

__all__ = [
    "FINISH_REASONS",
    "AdamW",
    "Batch",
    "CheckpointInfo",
    "Devices",
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
    "Piece",
    "Ragged",
    "RaggedLike",
    "Sample",
    "SamplingParams",
    "SyncReceipt",
    "Tensor",
    "TensorForm",
    "WeightsVersion",
    "Work",
    "mfu",
]
