"""Client: the end of one call, told once and waited for by threads (imports threading only)."""

from __future__ import annotations

import threading
from typing import Any


class Ending:
    """Response or error of a call, once it has come.

    A lock that is held until then: of what threads can wait on it costs least, and each operation
    makes one.
    """

    __slots__ = ("_open", "_untold", "done", "error", "response")

    def __init__(self) -> None:
        self.done = False
        self.response: Any = None
        self.error: BaseException | None = None
        self._untold = threading.Lock()
        self._open = threading.Lock()
        self._open.acquire()

    def tell(self, response: Any, error: BaseException | None) -> bool:
        """The end, from any thread. False where it was told before: this one is ignored."""
        if not self._untold.acquire(blocking=False):
            return False
        self.response, self.error, self.done = response, error, True
        self._open.release()
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end, for `timeout` seconds at most; whether it has come."""
        if self.done:
            return True
        seconds = -1.0 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)
        if self._open.acquire(timeout=seconds):
            self._open.release()  # for the next one that waits
        return self.done
