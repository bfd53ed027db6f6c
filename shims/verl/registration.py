"""Shim (loop side, above the client): what is added to verl's registries, and when that fails.

Imports verl inside `register` only.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from typing import Any

from . import NAME
from .remote_backend.registering import has_seam, register_seam

_INSTALL = 'pip install "remote-rl[verl]"'


def register() -> None:
    """Registers what `shims.verl.register` names, wherever this verl has a place for it: in the
    registries of the V1 trainer, and in those of the RemoteBackend seam."""
    trainer, seam = _has("verl.trainer.ppo.v1"), has_seam()
    if not trainer and not seam:
        raise ImportError(
            f"verl {importlib.metadata.version('verl')} has neither a V1 trainer nor a "
            f"RemoteBackend seam, one of which the shim needs; {_INSTALL}"
        )
    if trainer:
        _require("transfer_queue")
        replicas = _require("verl.workers.rollout.replica")
        replicas.RolloutReplicaRegistry.register(NAME, _load_replica)
        _require(".trainer")  # its decorators add the trainer modes
    if seam:
        register_seam()  # its replica serves the shim's own trainers too


def register_loudly() -> None:
    """`register` for verl's own loading, which logs a plug-in's exception at DEBUG only: the
    failure is printed, in one line, before it is raised."""
    try:
        register()
    except Exception as error:
        reason = " ".join(str(error).split())
        message = f"the verl shim of remote_rl could not register itself: {reason}"
        print(message, file=sys.stderr, flush=True)
        raise


def _load_replica() -> type[Any]:
    from .replica import RemoteReplica

    return RemoteReplica


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


def _require(module: str) -> Any:
    try:
        return importlib.import_module(module, __package__)
    except ImportError as error:
        raise ImportError(
            f"trainer mode {NAME!r} needs {module.lstrip('.')}, which can't be imported with verl "
            f"{importlib.metadata.version('verl')} ({error}); {_INSTALL}"
        ) from error
