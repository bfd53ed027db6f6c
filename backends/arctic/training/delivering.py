"""Arctic backend: how a rank gives its weights to the sampler (imports torch, publishing, joining
and weights).

Each way has a writer, which takes one whole tensor after the other; every rank takes part in
gathering them, to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch.distributed import TCPStore

from remote_rl.errors import BackendError, RemoteRLError, as_remote_error

from ..weights.broadcast import Group, join, open_store
from ..weights.device_paths import BroadcastWriter, IpcWriter
from ..weights.manifest import Entry, Form, Manifest, check, lay_out, not_finite
from ..weights.segment import SegmentWriter
from ..weights.sources import IpcHandles, Meeting
from . import joining, publishing
from .loading import Loaded
from .zero import Zero

W = TypeVar("W", bound=SegmentWriter | IpcWriter | BroadcastWriter | None)


class Deliveries:
    """Of one rank. All ranks get the same calls, but for `call_off`, which comes from another
    thread."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._lent: IpcWriter | None = None
        self._store: TCPStore | None = None
        self._group: Group | None = None
        self._called_off: set[str] = set()

    @property
    def pulse(self) -> int:
        """Rises with each piece that is broadcast."""
        return 0 if self._group is None else self._group.moved

    def publish(
        self, loaded: Loaded, engine: Zero, segment: str, forms: Mapping[str, Form] | None
    ) -> list[Entry]:
        """As `Rank.publish`."""
        writer = self._sent(
            loaded,
            engine,
            forms,
            lambda manifest: SegmentWriter(segment, manifest) if self._rank == 0 else None,
        )
        return [] if writer is None else list(writer.finish())

    def lend(self, loaded: Loaded, engine: Zero, forms: Mapping[str, Form] | None) -> IpcHandles:
        """As `Rank.lend`."""
        self._lent = self._sent(loaded, engine, forms, IpcWriter)
        return self._lent.finish()

    def take_back(self) -> None:
        """As `Rank.take_back`."""
        self._lent = None
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()

    # -- broadcasts ---------------------------------------------------------------------------

    def check_weights(self, loaded: Loaded, forms: Mapping[str, Form]) -> None:
        """As `Rank.check_weights`."""
        _expected(loaded, forms)
        wrong = publishing.not_finite(loaded)
        joining.agree(None if wrong is None else not_finite(wrong))

    def open_store(self, patience: float) -> int | RemoteRLError | None:
        """As `Rank.open_store`."""
        self.leave()
        if self._rank != 0:
            return None
        try:
            self._store = open_store(patience)
        except Exception as error:  # noqa: BLE001 - a value: the ranks live on
            return as_remote_error(error)
        return int(self._store.port)

    def join_group(self, meeting: Meeting) -> RemoteRLError | None:
        """As `Rank.join_group`."""
        if self._rank != 0:
            return None
        store, self._store = self._store, None
        try:
            self._group = join(meeting, 0, store, lambda: meeting.name in self._called_off)
        except Exception as error:  # noqa: BLE001 - a value: the ranks live on
            return as_remote_error(error)
        return None

    def broadcast(
        self, loaded: Loaded, engine: Zero, name: str, forms: Mapping[str, Form]
    ) -> RemoteRLError | None:
        """As `Rank.broadcast`."""

        def make(manifest: Manifest) -> BroadcastWriter | None:
            if self._rank != 0:
                return None
            group = self._group
            ours = group is not None and group.meeting.name == name
            return BroadcastWriter(group if ours else None, manifest)

        writer = self._sent(loaded, engine, forms, make)
        return None if writer is None else writer.finish()

    def call_off(self, name: str) -> None:
        """As `Rank.call_off`."""
        self._called_off.add(name)
        group = self._group
        if group is not None and group.meeting.name == name:
            group.abort()

    def leave(self) -> None:
        """The group, if there is one, and where another would have met."""
        group, self._group, self._store = self._group, None, None
        self._called_off.clear()  # of meetings that are over; the next one has another name
        if group is not None:
            group.abort()

    def _sent(
        self,
        loaded: Loaded,
        engine: Zero,
        forms: Mapping[str, Form] | None,
        make: Callable[[Manifest], W],
    ) -> W:
        """What has taken all weights, made once it is known what they are; None takes none, and
        the rank takes part for the others."""
        expected = _expected(loaded, forms)
        failure = None
        try:
            writer = make(lay_out(expected))
        except BackendError as error:
            failure = error
        joining.agree(failure)
        for name, tensor in publishing.weights(loaded, engine):
            if writer is not None:
                writer.write(name, tensor)
        return writer


def _expected(loaded: Loaded, forms: Mapping[str, Form] | None) -> dict[str, Form]:
    """What is sent, in the dtypes of `forms`; checked to be what these expect."""
    own = publishing.forms(loaded)
    if forms is None:
        return own
    expected = {name: forms.get(name, own[name]) for name in own}
    given = {name: (own[name][0], dtype) for name, (_, dtype) in expected.items()}
    check(given, forms, "the sampler")
    return expected
