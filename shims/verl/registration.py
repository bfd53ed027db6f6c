"""Shim (loop side, above the client): what is added to verl's registries, and when that fails.

Imports verl inside `register` only.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from . import NAME


def register() -> None:
    """Registers the rollout replica and the trainer mode; see `shims.verl.register`."""
    _require("transfer_queue", 'pip install "TransferQueue>=0.1.10"')
    replicas = _require("verl.workers.rollout.replica", "pip install verl==0.9.1")
    _require("verl.trainer.ppo.v1", "pip install verl==0.9.1")
    replicas.RolloutReplicaRegistry.register(NAME, _load_replica)
    importlib.import_module(".trainer", __package__)  # its decorator adds the trainer mode


def register_loudly() -> None:
    """`register` for verl's own loading, which logs a plug-in's exception at DEBUG only: the
    failure is printed before it is raised."""
    try:
        register()
    except Exception as error:
        message = f"the verl shim of remote_rl could not register itself: {error}"
        print(message, file=sys.stderr, flush=True)
        raise


def _load_replica() -> type[Any]:
    from .replica import RemoteReplica

    return RemoteReplica


def _require(module: str, install: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"trainer mode {NAME!r} needs {module}, which can't be imported ({error}); {install}"
        ) from error
