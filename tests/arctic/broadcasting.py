"""The arctic backend whose broadcasts can be stopped in the middle: what stands in a file is done
to one process as the next broadcast begins. Imported in the engine's process too."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import attrs
import psutil

from backends.arctic import engine
from backends.arctic.backend import ArcticBackend
from backends.arctic.broadcasting import Broadcasts
from backends.arctic.child import Child
from backends.arctic.config import ArcticConfig
from backends.arctic.engine_factory import environment
from backends.arctic.hosted import Served
from remote_rl.errors import BackendError

_FILE = "REMOTE_RL_TEST_BROADCAST"


class _Stopped(Broadcasts):
    """Looks into the file before both sides begin. "rank 0", "engine 1": that process stands still.
    "refusal": engine 1 refuses its update, and knows nothing of it."""

    @contextlib.asynccontextmanager
    async def _sending(self, *given: Any) -> AsyncIterator[Any]:
        path = Path(os.environ[_FILE])
        asked = path.read_text() if path.exists() else ""
        path.unlink(missing_ok=True)
        if asked == "refusal":
            _refuse(self._pool.living[1])
        elif asked:
            half, number = asked.split()
            processes = self._trainers.processes
            if half == "engine":
                processes = tuple(each.process for each in self._pool.living)
            os.kill(processes[int(number)].process, signal.SIGSTOP)
        async with super()._sending(*given) as sent:
            yield sent


def _refuse(worker: Any) -> None:
    ask = worker.ask

    async def refuse(method: str, *given: Any) -> Any:
        if method == "update":
            worker.ask = ask
            raise BackendError("it does not want them", worker=worker.name)
        return await ask(method, *given)

    worker.ask = refuse


def create_engine(config: ArcticConfig, version: int | None, folder: Path, reports: Any) -> Any:
    """In the engine's process."""
    engine.Broadcasts = _Stopped  # type: ignore[misc]
    return engine.Engine(config, version, folder, reports)


class Stopping(ArcticBackend):
    """With that engine."""

    def __init__(self, config: ArcticConfig, faults: Path) -> None:
        super().__init__(config)
        self._faults = faults

    def _new_child(self, base_version: int | None, served: Served) -> Child:
        own = environment(self.config) | {
            "PYTHONPATH": str(Path(__file__).parent),
            _FILE: str(self._faults),
        }
        return Child(create_engine, (self.config, base_version), own, served)


@attrs.frozen
class Fault:
    """Of the next broadcast."""

    file: Path

    def is_to_be(self, what: str) -> None:
        """As `_Stopped` understands it."""
        self.file.write_text(what)

    def has_come(self) -> bool:
        """Whether the broadcast has begun, and the fault is there."""
        return not self.file.exists()


def stands_still(process: psutil.Process) -> bool:
    """Whether it was stopped."""
    return bool(process.status() == psutil.STATUS_STOPPED)
