"""The engine's own part in what ranks and engines do: signs of life, and an end to waiting."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from backends.arctic.config import ArcticConfig
from backends.arctic.engine import Engine
from backends.arctic.trainers import TrainerGroup
from remote_rl.errors import BackendError
from remote_rl.requests import Load, Reset


class Context:
    """Of one operation, with a checkpoint's directory."""

    version, next_version, request_id = 3, 4, "c:training:1"

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "arctic.json").write_text('{"reference_version": 0}')
        self.told: list[str] = []

    def progress(self, done: float, total: float | None = None, what: str = "") -> None:
        self.told.append(what)

    async def thread(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.to_thread(function, *arguments)


class Reports:
    """Hears nothing."""

    def workers(self, processes: Any) -> None: ...

    def serving(self, version: int | None, label: Any) -> None: ...


@pytest.mark.parametrize("operation", ["load", "reset"])
def test_ranks_that_are_started_again_show_it_and_are_given_up_in_time(
    operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster may have no room for them any more, and a large model loads for minutes, in which
    a silent operation would end the run."""

    async def gone(self: Any) -> bool:
        return False

    async def start(self: Any, context: Any, heard: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(TrainerGroup, "alive", gone)
    monkeypatch.setattr(TrainerGroup, "start", start)
    placement = {"device": "cpu", "start_timeout": 0.2}
    reports: Any = Reports()
    engine = Engine(ArcticConfig(model="any", placement=placement), None, tmp_path, reports)
    context: Any = Context(tmp_path)

    async def script() -> None:
        if operation == "load":
            await engine.training.load(Load(name="one"), context)
        else:
            await engine.reset(Reset(), context)

    with pytest.raises(BackendError, match=r"training ranks again was not done within 0\.2 s"):
        asyncio.run(script())
    assert set(context.told) == {"starting the training ranks again"}
