"""Client: sessions, their faces and operations
(imports the contract and, when used, transports)."""

from .connecting import connect
from .handle import Handle
from .operation import GenerateOperation, Operation
from .session import Session

__all__ = ["GenerateOperation", "Handle", "Operation", "Session", "connect"]
