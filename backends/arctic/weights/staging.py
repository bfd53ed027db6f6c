"""Arctic backend: a segment that is filled by a push in parts, apart from what the engines serve
(imports manifest, segment and the contract)."""

from __future__ import annotations

import time
from collections.abc import Mapping

from remote_rl.errors import ConflictError
from remote_rl.types import Piece

from .manifest import Form, Manifest, lay_out
from .segment import SegmentWriter, new_name, unlink


class Staging:
    """One segment at most. Which pieces come, and in which order, the dispatcher has seen to."""

    def __init__(self) -> None:
        self._held: Staged | None = None

    def begin(self, transfer: str, forms: Mapping[str, Form]) -> None:
        """A segment for these tensors; one that was never taken is removed. Blocks. Raises
        `BackendError` where the machine has no room."""
        self.drop()
        self._held = Staged(transfer, lay_out(forms))

    def write(self, transfer: str, pieces: Mapping[str, Piece]) -> None:
        """Each piece at its place. Blocks."""
        writer = self._of(transfer).writer
        for name, piece in pieces.items():
            writer.write_bytes(name, piece.offset, piece.data)

    def take(self, transfer: str) -> Staged:
        """What was filled; whoever takes it removes the segment."""
        held = self._of(transfer)
        self._held = None
        return held

    def drop(self) -> None:
        """Removes the segment, if there is one."""
        held, self._held = self._held, None
        if held is not None:
            unlink(held.segment)

    def _of(self, transfer: str) -> Staged:
        if self._held is None or self._held.transfer != transfer:
            raise ConflictError(
                f"the engine holds no tensors of transfer {transfer!r}: its process was started "
                "again since; send them anew",
                transfer=transfer,
            )
        return self._held


class Staged:
    """A segment and who writes into it. began: when, on the monotonic clock."""

    def __init__(self, transfer: str, manifest: Manifest) -> None:
        self.transfer = transfer
        self.began = time.monotonic()
        self.segment = new_name()
        self.writer = SegmentWriter(self.segment, manifest)
