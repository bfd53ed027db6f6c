"""Dispatcher: what it keeps for each attached client (imports the contract, streams, record,
budget)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..errors import ProtocolError
from ..messages import Outcome, PartialSamples, ProgressReport, Waited
from ..ops import Stream
from ..requests import Abort
from ..types.generation import Generation
from .budget import Ledger, array_bytes
from .leases import Lease
from .record import Record, State
from .streams import ClientStream

#: an answer to a wait carries outcomes of about this many bytes at most (one at least)
_WAITED_BYTES = 64 * 1024 * 1024
_SAMPLING = Stream.SAMPLING.value
#: digits of 2**53, the largest number of an operation, and one more
_LONGEST_NUMBER = 17
#: operations without arrays that are kept for one stream; each takes a few kilobytes
_MOST_RECORDS = 100_000
#: control operations of one group that arrive late are answered and ignored
CONTROL_GROUPS: Mapping[str, str] = {
    "pause": "flow",
    "resume": "flow",
    "reset_prefix_cache": "cache",
}


class Client:
    """Streams, control numbers, bytes that are kept and the wake-up signal of one client."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.streams = {stream.value: ClientStream(stream) for stream in Stream}
        self.seed_base = 0
        self.ledger = Ledger()
        self._aborted_up_to = 0
        self._aborted: set[int] = set()
        self._latest_control: dict[str, int] = {}
        self._signal = asyncio.Event()

    def records(self) -> Iterator[Record]:
        """All records that are kept."""
        for stream in self.streams.values():
            yield from stream

    def _present(self) -> Iterator[Record]:
        """As `records`, for who lets none go meanwhile: a wait looks at thousands."""
        return itertools.chain.from_iterable(
            stream.records.values() for stream in self.streams.values()
        )

    def acknowledge(self, keys: Iterable[tuple[Any, ...]]) -> None:
        """The client holds these outcomes."""
        for key in keys:
            if len(key) != 2 or type(key[0]) is not str or type(key[1]) is not int:
                raise ProtocolError(f"{key!r} is no stream and number of an operation")
            stream, number = key
            held = self.streams.get(stream)
            if held is None:
                raise ProtocolError(f"there is no stream {stream!r}")
            held.acknowledge(number)
            if stream == _SAMPLING:
                self._aborted.discard(number)

    def is_late_control(self, operation: str, number: int) -> bool:
        """Whether a newer control operation of the group was seen; remembers this one."""
        group = CONTROL_GROUPS.get(operation)
        if group is None:
            return False
        latest = self._latest_control.get(group, 0)
        self._latest_control[group] = max(latest, number)
        return number < latest

    def has_room(self, stream: ClientStream, number: int, size: int, budget: int) -> bool:
        """Whether an operation of `size` bytes may come in.

        What the rest of a stream waits for always may, and so may one of a stream that keeps
        nothing: whatever room is waited for, it can be made.
        """
        if stream.is_next(number):
            return True
        if size == 0:
            return len(stream.records) < _MOST_RECORDS
        return self.ledger.kept + size <= budget or not stream.keeps_bytes

    def remember_abort(self, abort: Abort, generates_before: int) -> None:
        """Generates of this client that an abort means may come after it: they waited for room,
        or their message was lost and is sent again."""
        if abort.request_ids is None:
            self._aborted_up_to = max(self._aborted_up_to, generates_before)
            return
        own = f"{self.lease.client_id}:{Stream.SAMPLING.value}:"
        for request_id in abort.request_ids:
            number = request_id.removeprefix(own)
            if number != request_id and number.isdecimal() and len(number) < _LONGEST_NUMBER:
                self._aborted.add(int(number))

    def was_aborted(self, number: int) -> bool:
        """Whether an earlier abort means this generate."""
        return number <= self._aborted_up_to or number in self._aborted

    def wake(self) -> None:
        """Something changed for this client."""
        self._signal.set()
        self.ledger.tell()

    async def changed(self, timeout: float) -> bool:
        """Waits for a change; False after `timeout` seconds without one."""
        try:
            async with asyncio.timeout(timeout):
                await self._signal.wait()
        except TimeoutError:
            return False
        self._signal.clear()
        return True

    def collect(self, cursors: Mapping[str, int], with_progress: bool) -> Waited:
        """What the client hasn't heard yet."""
        return Waited(
            outcomes=self._outcomes(),
            progress=self._progress() if with_progress else (),
            partials=self._partials(cursors),
        )

    def _outcomes(self) -> tuple[Outcome, ...]:
        outcomes: list[Outcome] = []
        size = 0
        for record in self._present():
            if record.state is not State.DONE or record.claims or record.delivered:
                continue
            outcomes.append(record.outcome())
            size += array_bytes(record.result)
            if size >= _WAITED_BYTES:
                break
        return tuple(outcomes)

    def _progress(self) -> tuple[ProgressReport, ...]:
        reports = []
        for record in self._present():
            if not record.progress_sent and record.state is State.RUNNING:
                record.progress_sent = True
                if record.progress is not None:
                    reports.append(record.progress)
        return tuple(reports)

    def _partials(self, cursors: Mapping[str, int]) -> tuple[PartialSamples, ...]:
        partials = []
        for text, held in cursors.items():
            # no number is above 2**53
            number = text.isdecimal() and len(text) <= 16
            if not number or type(held) is not int or held < 0:
                raise ProtocolError(
                    f"{text!r:.40}: {held!r:.40} is no number of a generate and its samples"
                )
            record = self.streams[Stream.SAMPLING.value].get(int(text))
            if record is None or record.done or len(record.samples) <= held:
                continue
            fresh = record.samples[held:]
            partials.append(
                PartialSamples(
                    number=record.key[1], start=held, samples=Generation.from_samples(fresh)
                )
            )
        return tuple(partials)
