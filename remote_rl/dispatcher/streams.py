"""Dispatcher: numbers, duplicates and gaps of one client, pure state
(imports the contract, record)."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import ConflictError
from ..messages import Digest
from ..ops import Stream
from .record import Record


class NumberSet:
    """A set of positive whole numbers that is nearly an interval: a watermark and what lies above
    it, so that it stays small however long a run lasts."""

    def __init__(self) -> None:
        self._up_to = 0
        self._above: set[int] = set()

    def add(self, number: int) -> None:
        """Adds one number; twice is once."""
        if number <= self._up_to:
            return
        if number == self._up_to + 1 and not self._above:  # nearly always
            self._up_to = number
            return
        self._above.add(number)
        while self._up_to + 1 in self._above:
            self._up_to += 1
            self._above.remove(self._up_to)

    def __contains__(self, number: int) -> bool:
        return number <= self._up_to or number in self._above


class ClientStream:
    """One stream of one client: what was accepted under which number.

    `sequenced` ones release records strictly by number; a gap holds what comes after it.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.sequenced = stream is Stream.TRAINING
        self.highest = 0
        self.records: dict[int, Record] = {}
        self._acknowledged = NumberSet()
        self._next = 1

    def __iter__(self) -> Iterator[Record]:
        return iter(list(self.records.values()))

    def find(self, number: int, operation: str, digest: Digest | None) -> Record | None:
        """The record that already has this number, None for a new one.

        Raises `ConflictError` for an acknowledged number and for one used for something else.
        """
        if number in self._acknowledged:
            raise ConflictError(
                f"{self.stream.value} operation {number} was finished and acknowledged; its number "
                "can't be used again",
                number=number,
            )
        record = self.records.get(number)
        if record is None:
            return None
        same = record.tombstone or record.digest == digest
        if record.operation.name != operation or not same:
            raise ConflictError(
                f"{self.stream.value} number {number} is already a {record.operation.name} of "
                f"other contents; this {operation} was not accepted",
                number=number,
            )
        return record

    def add(self, record: Record) -> tuple[Record, ...]:
        """Accepts a new record; returns what has its turn now, in order. One that is already done
        (cancelled) is among them, so that its failure counts where it stood."""
        number = record.key[1]
        self.records[number] = record
        self.highest = max(self.highest, number)
        if not self.sequenced:
            return (record,)
        ready = []
        while (following := self.records.get(self._next)) is not None:
            # its place was kept until its turn
            if following.done and self._next in self._acknowledged:
                self._forget(self._next)
            self._next += 1
            ready.append(following)
        return tuple(ready)

    def is_next(self, number: int) -> bool:
        """Whether everything else in the order waits for this number."""
        return self.sequenced and number <= self._next

    @property
    def keeps_bytes(self) -> bool:
        """Whether arrays are kept for any of its operations."""
        return any(record.kept for record in self.records.values())

    def get(self, number: int) -> Record | None:
        """The record of this number, if one is kept."""
        return self.records.get(number)

    def acknowledge(self, number: int) -> None:
        """Forgets a finished record's outcome for good; anything else is left as it is."""
        record = self.records.get(number)
        if record is None or not record.done:
            return
        self._acknowledged.add(number)
        record.delivered = True
        # one that was settled before its turn (a tombstone) still holds its place in the order
        if not self.sequenced or number < self._next:
            self._forget(number)

    def _forget(self, number: int) -> None:
        self.records.pop(number).forget()
