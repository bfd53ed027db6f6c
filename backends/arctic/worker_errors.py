"""Arctic backend: how the failure of a worker is told, the same for ranks and engines (imports the
contract's errors)."""

from __future__ import annotations

from typing import Any

from remote_rl.errors import BackendError


def worker_error(
    worker: str, why: object, method: str, then: str, traceback: str, **details: Any
) -> BackendError:
    """The error of one worker. worker: "rank 0", "sampling engine 1". why: an error that it has
    told of, or the kind of its death, which is one where it could tell nothing any more. method:
    what it did; empty where it did nothing. then: what became of it, and what to do. traceback: and
    the worker's last output."""
    what = "died" if isinstance(why, type) else "failed"
    reason = why.__name__ if isinstance(why, type) else why
    where = f" in {method}" if method else ""
    return BackendError(
        f"{worker} {what} ({reason}){where}; {then}", worker=worker, traceback=traceback, **details
    )
