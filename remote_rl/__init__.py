"""Package: remote_rl, one typed protocol between RL post-training loops and the engines that train
and sample (imports errors, losses, types; the client when it is used).

The data classes and losses are there at once; `connect` and what it returns are imported when first
used, so that a program that only builds batches pays only for those.
"""

import logging
from typing import TYPE_CHECKING, Any

from . import errors, losses
from .__about__ import __version__
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

if TYPE_CHECKING:
    from .byte_tokenizer import ByteTokenizer
    from .client import GenerateOperation, Handle, Operation, Session, connect
    from .messages import ProgressReport
    from .protocol import Capabilities, ModelInfo
    from .run_info import RunInfo

__all__ = [
    "AdamW",
    "Batch",
    "ByteTokenizer",
    "Capabilities",
    "CheckpointInfo",
    "Done",
    "ExportReceipt",
    "ForwardBackwardResult",
    "GenerateOperation",
    "Group",
    "Handle",
    "LoadResult",
    "ModelInfo",
    "Operation",
    "OptimStepResult",
    "Outputs",
    "ProgressReport",
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

_ON_FIRST_USE = {
    "ByteTokenizer": "byte_tokenizer",
    "Capabilities": "protocol",
    "GenerateOperation": "client",
    "Handle": "client",
    "ModelInfo": "protocol",
    "Operation": "client",
    "ProgressReport": "messages",
    "RunInfo": "run_info",
    "Session": "client",
    "connect": "client",
}

logging.getLogger("remote_rl").addHandler(logging.NullHandler())  # the application decides


def _publish(name: str, value: Any) -> Any:
    # tracebacks and reprs show the public name, whichever module defines it
    if isinstance(value, type) or name == "connect":
        value.__module__ = "remote_rl"
    return value


for _name in __all__:
    if _name not in _ON_FIRST_USE:
        _publish(_name, globals()[_name])
del _name


def __getattr__(name: str) -> Any:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module 'remote_rl' has no attribute {name!r}")
    import importlib

    module = importlib.import_module(f".{_ON_FIRST_USE[name]}", __name__)
    value = globals()[name] = _publish(name, getattr(module, name))
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
