"""Arctic backend: what dead processes leave on a machine, and its removal (imports weights.segment
only)."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from remote_rl.errors import BackendError

from .weights.segment import STATE_FIELD, Owner, owner_of, process_facts
from .weights.segment import remove_of as remove_segments

__all__ = ["Owner", "end_processes", "end_session", "kill_session", "owner_of", "remove_segments"]

_PATIENCE_SECONDS = 5.0
_LOOK_SECONDS = 0.02
#: of `process_facts`
_SESSION_FIELD, _THREADS_FIELD = 3, 17


def end_processes(processes: Iterable[Owner]) -> None:
    """SIGKILL to each that still lives on this machine. One that has ended, or whose number another
    process has by now, or that runs elsewhere, is left alone."""
    for each in processes:
        with contextlib.suppress(BackendError, ProcessLookupError):  # it has ended
            if owner_of(each.process) == each:
                os.kill(each.process, signal.SIGKILL)


def kill_session(leader: int) -> list[int]:
    """SIGKILL to every process of the session that was begun by the process of this number, except
    the caller; the numbers of those that lived. Ray's own processes and its workers, also those
    that nobody has used yet, are in the session of the process that started them."""
    found = [process for process in _members(leader) if process != os.getpid()]
    for process in found:
        with contextlib.suppress(ProcessLookupError):  # it was faster
            os.kill(process, signal.SIGKILL)
    return found


def end_session(leader: int) -> None:
    """`kill_session`, until none is left; 5 s at most, since what hangs in the kernel stays."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while kill_session(leader) and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)


def _members(leader: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        fields = process_facts(int(path.name))
        if fields is None:
            continue  # it ended meanwhile
        # one that is over can have threads that are not, and hold its ports
        over = fields[STATE_FIELD] in "ZX" and int(fields[_THREADS_FIELD]) <= 1
        if not over and int(fields[_SESSION_FIELD]) == leader:
            found.append(int(path.name))
    return found
