"""Testing: what reached the mock, in order, with a few questions to ask of it (imports errors and
ops)."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, Protocol, TypeAlias

from ..errors import InvalidRequestError, UnknownNameError, nearest
from ..ops import ALWAYS_OFFERED, OPERATIONS

Event: TypeAlias = Literal["started", "ended", "failed"]

_EVENTS = ("started", "ended", "failed")
#: what a backend is asked to do; the rest the dispatcher does itself
_LOGGED = frozenset({"start"} | (set(OPERATIONS) - ALWAYS_OFFERED))


class LoggedCall(Protocol):
    """One entry: an operation began, ended, or failed.

    operation: its name, "start" for the backend's own. request: what came with it, an object of
    `remote_rl.requests`, None for "start". scheduling: the request's scheduling fields by name.
    request_id: as `Operation.request_id` says it.
    """

    @property
    def operation(self) -> str: ...
    @property
    def event(self) -> Event: ...
    @property
    def request_id(self) -> str: ...
    @property
    def scheduling(self) -> Mapping[str, Any]: ...
    @property
    def request(self) -> Any: ...


class _Records(list[LoggedCall]):
    """The list that a mock appends to, from the thread of its run."""

    def __init__(self) -> None:
        super().__init__()
        self.grown = threading.Condition()

    def append(self, call: LoggedCall) -> None:
        with self.grown:
            super().append(call)
            self.grown.notify_all()


class CallLog:
    """What the mock was asked to do, oldest first: `connect("mock", call_log=log.records)`.

    Only what reached the backend is here: an operation that was refused before, or answered by the
    dispatcher alone (info, version, checkpoints and the like), is not. Requests are kept whole, so
    a log holds every batch of its test in memory.
    """

    def __init__(self, calls: Iterable[LoggedCall] = ()) -> None:
        self.records = _Records()
        self.records.extend(calls)

    def __iter__(self) -> Iterator[LoggedCall]:
        return iter(self.records[:])

    def __len__(self) -> int:
        return len(self.records)

    def __repr__(self) -> str:
        return f"CallLog({self.names()})"

    def names(self, *operations: str, event: Event = "ended") -> list[str]:
        """The operations, or those of them that are named here, in the order of the event.

        assert calls.names("optim_step", "sync") == ["optim_step", "sync"] * 3
        """
        return [call.operation for call in self._chosen(operations, event)]

    def count(self, operation: str, event: Event = "ended") -> int:
        """How many of this operation ended (or started, or failed)."""
        return len(self._chosen((operation,), event))

    def requests(self, operation: str, event: Event = "ended") -> list[Any]:
        """The requests of this operation, objects of `remote_rl.requests`.

        assert [step.optimizer.lr for step in calls.requests("optim_step")] == [0.1, 0.05]
        """
        return [call.request for call in self._chosen((operation,), event)]

    @property
    def failed(self) -> list[str]:
        """The operations that failed in the backend, in order."""
        return self.names(event="failed")

    def runs(self) -> list[CallLog]:
        """A log for each run, where a test had several: each begins with its "start"."""
        pieces: list[list[LoggedCall]] = []
        for call in self:
            if not pieces or (call.operation, call.event) == ("start", "started"):
                pieces.append([])
            pieces[-1].append(call)
        return [CallLog(piece) for piece in pieces]

    def clear(self) -> None:
        """Forgets what happened so far."""
        self.records.clear()

    def wait_for(
        self, operation: str, count: int = 1, *, event: Event = "ended", timeout: float = 30.0
    ) -> None:
        """Waits until `count` of this operation have ended (or started, or failed), for a test
        that interferes with a loop in another thread. `TimeoutError` after `timeout` seconds."""

        def enough() -> bool:
            return self.count(operation, event) >= count

        with self.records.grown:
            if not self.records.grown.wait_for(enough, timeout):
                raise TimeoutError(
                    f"{self.count(operation, event)} of {count} {operation} {event} within "
                    f"{timeout:g} s; the log says {self.names(event='started')}"
                )

    def _chosen(self, operations: tuple[str, ...], event: Event) -> list[LoggedCall]:
        for name in operations:
            _check_logged(name)
        if event not in _EVENTS:
            raise InvalidRequestError(f"event must be one of {_EVENTS}, not {event!r}")
        return [
            call
            for call in self
            if call.event == event and (not operations or call.operation in operations)
        ]


def _check_logged(name: str) -> None:
    """A misspelt name would be found zero times, and a test of that would pass."""
    if name in ALWAYS_OFFERED:
        raise InvalidRequestError(
            f"{name} is answered by the dispatcher and reaches no backend, so the call log never "
            "holds it",
            field=name,
        )
    if name not in _LOGGED:
        raise UnknownNameError(f"there is no operation {name!r}; {nearest(name, _LOGGED)}")
