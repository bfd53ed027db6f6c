"""Dispatcher: what a run has done so far, in numbers (imports errors, run_info, types,
record, budget).

Of every accepted record `accepted`, `started` and `ended` are told, once each and in this order;
`started` is left out where it never began. Nothing here waits or holds on to what it counts.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np

from .. import errors
from ..errors import RemoteRLError
from ..run_info import Distribution, FailureStatus, OperationStatus
from ..types.generation import Generation, Sample
from .budget import array_bytes
from .clock import Clock
from .record import Record

log = logging.getLogger("remote_rl.dispatcher.operations")

#: upper bounds in seconds: from a small operation in process to a generation of an hour
SECONDS: tuple[float, ...] = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    *(30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0),
)
#: upper bounds in versions
VERSIONS: tuple[float, ...] = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
_RECENT_SAMPLES = 1024
#: streams whose operations are logged one by one; samples and queries come by thousands
_LOGGED = frozenset({"training"})
#: errors whose sentences say what the run or its engine did, never what a client sent
_OWN_WORDS = frozenset(
    each.__name__
    for each in (
        errors.BackendError,
        errors.StalledError,
        errors.RunLostError,
        errors.DeadlineExceededError,
        errors.OperationCancelled,
        errors.LeaseError,
    )
)


class Tally:
    """A `Distribution` that grows."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, number: float) -> None:
        """One more number."""
        self.counts[bisect_left(self.bounds, number)] += 1
        self.total += number

    def distribution(self) -> Distribution:
        """As it is now."""
        return Distribution(bounds=self.bounds, counts=self.counts, total=self.total)


@attrs.define
class _Counts:
    queued: int = 0
    running: int = 0
    succeeded: int = 0
    failed: Counter[str] = attrs.field(factory=Counter)
    refused: Counter[str] = attrs.field(factory=Counter)
    queue_seconds: Tally = attrs.field(factory=lambda: Tally(SECONDS))
    run_seconds: Tally = attrs.field(factory=lambda: Tally(SECONDS))
    received_bytes: int = 0
    sent_bytes: int = 0


@attrs.frozen
class _Failure:
    operation: str
    error: str
    when: float


class Statistics:
    """Counts the operations of one run. version: the trainer's weights, now."""

    def __init__(self, clock: Clock, version: Callable[[], int]) -> None:
        self._clock = clock
        self._version = version
        self._began = clock.now()
        self._operations: defaultdict[str, _Counts] = defaultdict(_Counts)
        self._staleness = Tally(VERSIONS)
        self._recent: deque[int] = deque(maxlen=_RECENT_SAMPLES)
        self._failure: _Failure | None = None
        self.busy = 0
        self.generated_samples = 0
        self.generated_tokens = 0

    # -- what is told -------------------------------------------------------------------------

    def accepted(self, record: Record) -> None:
        """A new record; it tells of its own end."""
        counts = self._operations[record.operation.name]
        counts.queued += 1
        if record.kept:
            counts.received_bytes += array_bytes(record.request)
        record.observer = self.ended

    def refused(self, operation: str, error: RemoteRLError) -> None:
        """A submit that was not accepted, among them late copies of what ended long ago."""
        self._operations[operation].refused[public_class(error)] += 1

    def had_no_room(self) -> None:
        """A submit was answered with `Busy`; its client brings it again."""
        self.busy += 1

    def started(self, record: Record) -> None:
        """An accepted record begins to run."""
        if record.started is None:
            record.started = self._clock.now()
        if record.observer is not None:
            counts = self._operations[record.operation.name]
            counts.queued -= 1
            counts.running += 1
            counts.queue_seconds.add(record.started - record.accepted)

    def sample_ended(self, sample: Sample) -> None:
        """A sample that its backend has handed over before the generate ended."""
        self._stale(self._version() - sample.first_version)

    def ended(self, record: Record) -> None:
        """An accepted record has its outcome."""
        name, now = record.operation.name, self._clock.now()
        counts = self._operations[name]
        if record.started is None:
            counts.queued -= 1
        else:
            counts.running -= 1
            counts.run_seconds.add(now - record.started)
        if record.error is not None:
            error = public_class(record.error)
            counts.failed[error] += 1
            self._failure = _Failure(name, error, now)
        else:
            counts.succeeded += 1
            counts.sent_bytes += array_bytes(record.result)
            if isinstance(record.result, Generation):
                self._generated(record.result, record.samples)
        self._log(record, now)

    def _generated(self, result: Generation, emitted: list[Sample]) -> None:
        self.generated_samples += len(result)
        self.generated_tokens += len(result.tokens.values)
        stale = self._version() - result.first_version
        if emitted:  # those were counted as they ended
            known = {(sample.prompt_index, sample.index) for sample in emitted}
            places = zip(result.prompt_index.tolist(), result.index.tolist())
            stale = stale[np.array([place not in known for place in places], np.bool_)]
        for versions in stale.tolist():
            self._stale(versions)

    def _stale(self, versions: int) -> None:
        # a push numbers the sampler's weights above the trainer's: those are not stale
        versions = max(0, versions)
        self._staleness.add(versions)
        self._recent.append(versions)

    def _log(self, record: Record, now: float) -> None:
        """One line of each training operation and of whatever failed; nothing of the request."""
        error = record.error
        level = logging.INFO if record.key[0] in _LOGGED else logging.DEBUG
        if error is not None and not isinstance(error, errors.OperationCancelled):
            level = logging.WARNING
        if not log.isEnabledFor(level):
            return
        seconds = now - (record.accepted if record.started is None else record.started)
        fields: dict[str, Any] = {
            "operation": record.operation.name,
            "client": record.client_id,
            "stream": record.key[0],
            "number": record.key[1],
            "request_id": record.request_id,
            "seconds": round(seconds, 6),
            "version": self._version(),
        }
        where = (record.operation.name, record.key[1], record.client_id)
        if error is None:
            log.log(
                level,
                "%s %d of %s ended in %.3f s at version %d",
                *where,
                seconds,
                fields["version"],
                extra=fields,
            )
            return
        fields["error"] = public_class(error)
        log.log(
            level,
            "%s %d of %s failed: %s",
            *where,
            _failure_text(record, error),
            extra=fields,
        )

    # -- what is asked ------------------------------------------------------------------------

    def uptime(self) -> float:
        """Seconds since the run was made."""
        return self._clock.now() - self._began

    def operations(self) -> Iterator[OperationStatus]:
        """One of each name that was asked for, by name."""
        for name in sorted(self._operations):
            counts = self._operations[name]
            yield OperationStatus(
                name=name,
                queued=counts.queued,
                running=counts.running,
                succeeded=counts.succeeded,
                failed=dict(counts.failed),
                refused=dict(counts.refused),
                queue_seconds=counts.queue_seconds.distribution(),
                run_seconds=counts.run_seconds.distribution(),
                received_bytes=counts.received_bytes,
                sent_bytes=counts.sent_bytes,
            )

    def staleness(self) -> Distribution:
        """Of all samples."""
        return self._staleness.distribution()

    def recent(self) -> tuple[float | None, int | None]:
        """Mean and largest staleness of the latest samples."""
        if not self._recent:
            return None, None
        return sum(self._recent) / len(self._recent), max(self._recent)

    def last_failure(self) -> FailureStatus | None:
        """Of an accepted operation."""
        last = self._failure
        if last is None:
            return None
        ago = self._clock.now() - last.when
        return FailureStatus(operation=last.operation, error=last.error, seconds_ago=ago)


def public_class(error: RemoteRLError) -> str:
    """The class of the tree that an error is of, so that there are only so many."""
    for each in type(error).__mro__:
        if each.__name__ in errors.__all__ and each.__module__ == errors.__name__:
            return each.__name__
    return RemoteRLError.__name__


def _failure_text(record: Record, error: RemoteRLError) -> str:
    """Class and, where it can't quote what the client sent, sentence. The client hears all."""
    name = public_class(error)
    return f"{name}: {error}" if name in _OWN_WORDS and record.operation.name != "abandon" else name
