"""Dispatcher: what it keeps for each attached client (imports messages, streams, record)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..errors import ProtocolError
from ..messages import Outcome, PartialSamples, ProgressReport, Waited
from ..ops import Stream
from ..types.generation import Generation
from .leases import Lease
from .record import Record, State
from .streams import ClientStream

#: an answer to a wait carries outcomes of about this many bytes at most (one at least)
_WAITED_BYTES = 64 * 1024 * 1024
#: control operations of one group that arrive late are answered and ignored
CONTROL_GROUPS: Mapping[str, str] = {
    "pause": "flow",
    "resume": "flow",
    "reset_prefix_cache": "cache",
}


class Client:
    """Streams, control numbers and the wake-up signal of one client."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.streams = {stream.value: ClientStream(stream) for stream in Stream}
        self.seed_base = 0
        self._latest_control: dict[str, int] = {}
        self._signal = asyncio.Event()

    def records(self) -> Iterator[Record]:
        """All records that are kept."""
        for stream in self.streams.values():
            yield from stream

    def acknowledge(self, keys: Iterable[tuple[Any, ...]]) -> None:
        """The client holds these outcomes."""
        for key in keys:
            if len(key) != 2 or type(key[0]) is not str or type(key[1]) is not int:
                raise ProtocolError(f"{key!r} is no stream and number of an operation")
            stream, number = key
            if stream not in self.streams:
                raise ProtocolError(f"there is no stream {stream!r}")
            self.streams[stream].acknowledge(number)

    def is_late_control(self, operation: str, number: int) -> bool:
        """Whether a newer control operation of the group was seen; remembers this one."""
        group = CONTROL_GROUPS.get(operation)
        if group is None:
            return False
        latest = self._latest_control.get(group, 0)
        self._latest_control[group] = max(latest, number)
        return number < latest

    def wake(self) -> None:
        """Something changed for this client."""
        self._signal.set()

    async def changed(self, timeout: float) -> bool:
        """Waits for a change; False after `timeout` seconds without one."""
        try:
            await asyncio.wait_for(self._signal.wait(), timeout)
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
        for record in self.records():
            if not record.done or record.claims or record.delivered:
                continue
            outcomes.append(record.outcome())
            size += result_bytes(record.result)
            if size >= _WAITED_BYTES:
                break
        return tuple(outcomes)

    def _progress(self) -> tuple[ProgressReport, ...]:
        reports = []
        for record in self.records():
            if record.state is State.RUNNING and not record.progress_sent:
                record.progress_sent = True
                if record.progress is not None:
                    reports.append(record.progress)
        return tuple(reports)

    def _partials(self, cursors: Mapping[str, int]) -> tuple[PartialSamples, ...]:
        partials = []
        for text, held in cursors.items():
            if not text.isdecimal() or type(held) is not int or held < 0:
                raise ProtocolError(
                    f"{text!r}: {held!r} is no number of a generate and its samples"
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


def result_bytes(result: object) -> int:
    """About how many bytes an outcome's arrays have."""
    total = 0
    for name in getattr(type(result), "__attrs_attrs__", ()):
        value = getattr(result, name.name)
        held = value.values() if isinstance(value, Mapping) else (value,)
        total += sum(getattr(item, "nbytes", 0) for item in held)
    return total
