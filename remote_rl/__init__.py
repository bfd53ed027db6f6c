"""Package: remote_rl, one typed protocol between RL post-training loops and the engines that train
and sample (imports errors, losses, types and the client when one of their names is first used).

Nothing else is imported with the package itself, not even numpy: every pytest session of a machine
that has remote-rl imports it for the plug-in of `remote_rl.testing`, and `remote-rl --help` does.
"""

import logging
from typing import TYPE_CHECKING, Any

from .__about__ import __version__

if TYPE_CHECKING:
    from . import errors, losses
    from .byte_tokenizer import ByteTokenizer
    from .client import GenerateOperation, Handle, Operation, Session, connect
    from .messages import ProgressReport
    from .protocol import Capabilities, ModelInfo
    from .run_info import RunInfo
    from .types import (
        AdamW,
        Batch,
        CheckpointInfo,
        Devices,
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
        Work,
        mfu,
    )

__all__ = [
    "AdamW",
    "Batch",
    "ByteTokenizer",
    "Capabilities",
    "CheckpointInfo",
    "Devices",
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
    "Work",
    "__version__",
    "connect",
    "errors",
    "losses",
    "mfu",
]

_SUBMODULES = ("errors", "losses")
_NAMES_OF = {
    "byte_tokenizer": ("ByteTokenizer",),
    "client": ("GenerateOperation", "Handle", "Operation", "Session", "connect"),
    "messages": ("ProgressReport",),
    "protocol": ("Capabilities", "ModelInfo"),
    "run_info": ("RunInfo",),
    "types": (
        *("AdamW", "Batch", "CheckpointInfo", "Devices", "Done", "ExportReceipt"),
        *("ForwardBackwardResult", "Group", "LoadResult", "OptimStepResult", "Outputs", "Ragged"),
        *("Sample", "SamplingParams", "SyncReceipt", "Tensor", "WeightsVersion", "Work", "mfu"),
    ),
}
_HOMES = {name: module for module, names in _NAMES_OF.items() for name in names}

logging.getLogger("remote_rl").addHandler(logging.NullHandler())  # the application decides


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'remote_rl' has no attribute {name!r}")
    import importlib

    if name in _SUBMODULES:
        return importlib.import_module(f".{name}", __name__)
    # the types too: results and samples show their public names, whatever is used first
    for home in ("types", _HOMES[name]):
        module = importlib.import_module(f".{home}", __name__)
        for each in _NAMES_OF[home]:
            globals()[each] = _publish(each, getattr(module, each))
    return globals()[name]


def _publish(name: str, value: Any) -> Any:
    # tracebacks and reprs show the public name, whichever module defines it
    if isinstance(value, type) or name in ("connect", "mfu"):
        value.__module__ = "remote_rl"
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
