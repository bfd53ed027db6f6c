"""Client: the checkpoints that one client has seen, for when its server can't be asked any more
(imports the contract)."""

from __future__ import annotations

from typing import Any

from ..run_info import CheckpointList
from ..types.results import CheckpointInfo, LoadResult


class SeenCheckpoints:
    """Names with the time of their saving, as results told them; 0 where only a load did."""

    def __init__(self) -> None:
        self._created: dict[str, float] = {}

    @property
    def last(self) -> str | None:
        """The one that was saved last, None where none was seen."""
        return max(self._created, key=self._created.__getitem__, default=None)

    @property
    def start_hint(self) -> str:
        """What to say as `start=` in a new run."""
        if self.last is None:
            return "start='base' (this client saw no checkpoint)"
        return f"start={self.last!r}, the last checkpoint that this client saw"

    def note(self, result: Any) -> None:
        """Takes in the result of any operation."""
        if isinstance(result, CheckpointInfo):
            self._created[result.name] = result.created
        elif isinstance(result, LoadResult):
            self._created.setdefault(result.name, 0.0)
        elif isinstance(result, CheckpointList):
            self._created = {info.name: info.created for info in result.checkpoints}

    def forget(self, name: str) -> None:
        """It is being deleted."""
        self._created.pop(name, None)
