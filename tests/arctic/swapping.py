"""The arctic backend with halves that make room for each other, on a CPU: all but where the memory
lies is as on a GPU. Imported in the engine's process too."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from backends.arctic.backend import ArcticBackend
from backends.arctic.child import Child
from backends.arctic.config import ArcticConfig
from backends.arctic.engine import Engine
from backends.arctic.engine_factory import environment
from backends.arctic.hosted import Served
from backends.arctic.placing import Placing, Sleeper


def place(config: ArcticConfig, training: Sleeper, sampling: Sleeper) -> Placing:
    """As of colocated halves; a CPU's would have nothing to give."""
    return Placing(training, sampling, exclusive=True)


def create_engine(config: ArcticConfig, version: int | None, folder: Path, reports: Any) -> Engine:
    """In the engine's process."""
    return Engine(config, version, folder, reports, place)


class Swapping(ArcticBackend):
    """With that engine."""

    def _new_child(self, base_version: int | None, served: Served) -> Child:
        own = environment(self.config) | {"PYTHONPATH": str(Path(__file__).parent)}
        return Child(create_engine, (self.config, base_version), own, served)


class Moves(logging.Handler):
    """What halves have done, as the log says: "training ASLEEP"."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        words = record.getMessage().split()
        if words[2:5] == ["half", "has", "moved:"]:
            self.made.append(f"{words[1]} {words[5]}")
