"""Shim (loop side, above the client): what is added to the seam's registries.

Imports verl inside `register_seam` only.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from .. import NAME


def has_seam() -> bool:
    """Whether the installed verl has `verl.remote_backend`."""
    return importlib.util.find_spec("verl.remote_backend") is not None


def register_seam() -> None:
    """Registers backend, forwarder worker and replica under the shim's name; may be repeated.

    Raises `ValueError` (the registry's own) where another package took the name.
    """
    seam = importlib.import_module("verl.remote_backend")
    backend = importlib.import_module(".backend", __package__)
    seam.RemoteBackendRegistry.register(NAME)(backend.RemoteRun)
    seam.RemoteBackendRegistry.register_worker(NAME, load_worker)
    replicas = importlib.import_module("verl.workers.rollout.replica")
    replicas.RolloutReplicaRegistry.register(NAME, load_replica)


def load_worker() -> type[Any]:
    """The forwarder worker; verl imports it when it starts the training."""
    from .worker import SeamWorker

    return SeamWorker


def load_replica() -> type[Any]:
    """The replica, for the seam's trainers and for the shim's own."""
    from .replica import SeamReplica

    return SeamReplica
