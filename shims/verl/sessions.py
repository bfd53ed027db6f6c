"""Shim (loop side, above the client): one member session a process, by the driver's handle.

Imports remote_rl only.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

from remote_rl import Session, connect, errors

_held: dict[str, Session] = {}
_lock = threading.Lock()


def member(handle: Mapping[str, Any] | None) -> Session:
    """This process's session for the run of `handle` (the driver's, as plain JSON values).

    Opened at the first call and kept for the process's life: Ray ends the process, and the lease
    runs out by itself. The token comes from REMOTE_RL_TOKEN.
    """
    if handle is None:
        raise errors.InvalidRequestError(
            "verl's configuration holds no handle of a run; the trainer writes it when it "
            "attaches, so use trainer.v1.trainer_mode=remote_rl"
        )
    key = json.dumps(dict(handle), sort_keys=True)
    with _lock:
        if key not in _held:
            _held[key] = connect(dict(handle))
        return _held[key]
