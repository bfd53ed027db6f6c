"""Client: one thread for the caller's own loss functions and for pushes in parts, one after the
other (imports threading)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Worker:
    """Runs jobs in the order of their submission on a daemon thread, which begins with the first.

    They are ordered anyway: the forward of a second loss comes after the backward of the first, and
    both after a push before them, so more threads would only wait. A job must not raise.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def ready(self) -> None:
        """Begins the thread; raises where the process can't have another one."""
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                thread.start()
                self._thread = thread

    @property
    def is_this_thread(self) -> bool:
        """Whether the caller is one of the jobs."""
        return threading.current_thread() is self._thread

    def submit(self, job: Callable[[], None]) -> None:
        """Appends a job; `ready` has been called before."""
        self._jobs.put(job)

    def stop(self) -> None:
        """No job begins any more; one that runs is not waited for."""
        self._jobs.put(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
