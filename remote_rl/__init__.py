"""remote_rl: one typed protocol between RL post-training loops and the engines that train and
sample."""

import logging

from . import errors, losses
from .__about__ import __version__
from .client import GenerateOperation, Handle, Operation, Session, connect
from .run_info import RunInfo
from .types import (
    AdamW,
    Batch,
    CheckpointInfo,
    Done,
    ExportReceipt,
    ForwardBackwardResult,
    Group,
    LoadResult,
    OptimStepResult,
    Outputs,
    Ragged,
    Sample,
    SamplingParams,
    SyncReceipt,
    Tensor,
    WeightsVersion,
)

__all__ = [
    "AdamW",
    "Batch",
    "CheckpointInfo",
    "Done",
    "ExportReceipt",
    "ForwardBackwardResult",
    "GenerateOperation",
    "Group",
    "Handle",
    "LoadResult",
    "Operation",
    "OptimStepResult",
    "Outputs",
    "Ragged",
    "RunInfo",
    "Sample",
    "SamplingParams",
    "Session",
    "SyncReceipt",
    "Tensor",
    "WeightsVersion",
    "__version__",
    "connect",
    "errors",
    "losses",
]

logging.getLogger("remote_rl").addHandler(logging.NullHandler())  # the application decides

for _name in __all__:
    _value = globals()[_name]
    # tracebacks and reprs show the public name, whichever module defines it
    if isinstance(_value, type) or _name == "connect":
        _value.__module__ = "remote_rl"
del _name, _value
