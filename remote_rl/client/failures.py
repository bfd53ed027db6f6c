"""Client: failures that nobody has looked at yet (imports errors and operation's Call)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import OperationCancelled, RemoteRLError

if TYPE_CHECKING:
    from .operation import Call


class Failures:
    """Failed calls of one connection in the order of their failures, until they are observed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[Call] = []

    def add(self, call: Call) -> None:
        """Takes note of a call that has ended; what its own caller cancelled is no failure."""
        error = call.error
        if error is None or (call.cancel_asked and isinstance(error, OperationCancelled)):
            return
        with self._lock:
            self._calls.append(call)

    def raise_dropped(self, asking: Call) -> None:
        """Raises the first failure of a call that nobody holds; the asker's own comes first."""
        if not self._calls or asking.error is not None:
            return
        failure = self.first(lambda call: not call.held)
        if failure is not None:
            raise failure

    def first(self, chosen: Callable[[Call], bool]) -> BaseException | None:
        """The first unobserved failure that `chosen` accepts, observed from now on."""
        with self._lock:
            self._calls = [call for call in self._calls if not call.observed]
            for call in self._calls:
                error = call.error
                if error is None or not chosen(call):
                    continue
                call.observed = True
                if isinstance(error, RemoteRLError):
                    error = error.copy()
                error.add_note(f"raised by {call.row.name}, whose result was not awaited")
                return error
        return None

    def observe_before(self, call: Call) -> None:
        """Failures of earlier operations of its stream are the causes of this call's own."""
        with self._lock:
            for earlier in self._calls:
                if earlier.row.stream is call.row.stream and earlier.number <= call.number:
                    earlier.observed = True
