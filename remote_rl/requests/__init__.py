"""Contract: one request class for each operation (imports types and losses).

`ops.py` says which operation each belongs to. `requirements()` names what a backend must declare
for the request to be legal; the client refuses anything missing before it is sent.
"""

from .base import RESERVED_NAMES, FileKind, Half, InFlight, Request, Requirement
from .sampling import Abort, FinishSession, Generate, Pause, ResetPrefixCache, Resume
from .session import Info, ListFiles, ReadFile, Reset, Sleep, Tokenizer, Wake
from .training import (
    Abandon,
    Checkpoints,
    Delete,
    DropSnapshot,
    Export,
    Forward,
    ForwardBackward,
    Load,
    OptimStep,
    RestoreSnapshot,
    Save,
    SetReference,
    Snapshot,
    ZeroGrad,
)
from .weights import Push, PushPart, Sync, Version

__all__ = [
    "RESERVED_NAMES",
    "Abandon",
    "Abort",
    "Checkpoints",
    "Delete",
    "DropSnapshot",
    "Export",
    "FileKind",
    "FinishSession",
    "Forward",
    "ForwardBackward",
    "Generate",
    "Half",
    "InFlight",
    "Info",
    "ListFiles",
    "Load",
    "OptimStep",
    "Pause",
    "Push",
    "PushPart",
    "ReadFile",
    "Request",
    "Requirement",
    "Reset",
    "ResetPrefixCache",
    "RestoreSnapshot",
    "Resume",
    "Save",
    "SetReference",
    "Sleep",
    "Snapshot",
    "Sync",
    "Tokenizer",
    "Version",
    "Wake",
    "ZeroGrad",
]
