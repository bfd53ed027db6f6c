"""Server side of these tests: the mock with stages, in a package of its own with an entry point.

Every operation passes `NAME-CALL-before` and `NAME-CALL-after`, a save also `save-CALL-half`, and
every checkpoint `place-CALL` before its rename. What it passes is a line of the file `passed` in
its folder; it waits there for as long as a file `hold-POINT` exists, and leaves by `SystemExit`
where a file `exit-POINT` does.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from backends.mock.backend import MockBackend
from backends.mock.config import MockConfig
from remote_rl.dispatcher.store import Store
from remote_rl.ops import OPERATIONS

LOOK = 0.01


class Stage:
    """The points of one process, in its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self.calls: Counter[str] = Counter()

    def call(self, name: str) -> str:
        """The name of this call."""
        with self._lock:
            self.calls[name] += 1
            return f"{name}-{self.calls[name]}"

    def say(self, point: str) -> None:
        """One more line of what happened."""
        with self._lock, (self._folder / "passed").open("a") as file:
            file.write(point + "\n")

    def held(self, point: str) -> bool:
        """Whether a test holds it."""
        return (self._folder / f"hold-{point}").exists()

    async def point(self, point: str) -> None:
        """Passes a point, on the event loop."""
        self.say(point)
        while self.held(point):
            await asyncio.sleep(LOOK)
        if (self._folder / f"exit-{point}").exists():
            raise SystemExit(3)

    def block(self, point: str) -> None:
        """Passes a point, on a thread."""
        self.say(point)
        while self.held(point):
            time.sleep(LOOK)


class StagedFace:
    """One face of the mock. in_thread: names of operations that wait on a thread, where nobody
    can cancel them."""

    def __init__(self, stage: Stage, face: Any, in_thread: frozenset[str]) -> None:
        self._stage = stage
        self._face = face
        self._in_thread = in_thread

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._face, name)
        if name not in OPERATIONS:
            return method

        async def staged(request: Any, context: Any) -> Any:
            call = self._stage.call(name)
            if name in self._in_thread:
                waiting = asyncio.get_running_loop().run_in_executor(
                    None, self._stage.block, f"{call}-before"
                )
                while not waiting.done():  # as an engine does that heeds no cancellation
                    try:
                        await asyncio.wait([waiting])
                    except asyncio.CancelledError:
                        self._stage.say(f"{call}-cancelled")
            else:
                await self._stage.point(f"{call}-before")
            if name == "save" and self._stage.held(f"{call}-half"):
                (context.directory / "weights.safetensors").write_bytes(b"half of it")
                await self._stage.point(f"{call}-half")
            result = await method(request, context)
            await self._stage.point(f"{call}-after")
            return result

        return staged


class StagedBackend:
    """stage: the folder. in_thread: operations that wait on a thread. child: whether a process of
    its own stands for the workers; its id is the file `child`. Other options are the mock's."""

    def __init__(
        self, *, stage: str, in_thread: list[str] | None = None, child: bool = False, **options: Any
    ) -> None:
        self._mock = MockBackend(MockConfig(**options))
        self._folder = Path(stage)
        self._stage = Stage(self._folder)
        chosen = frozenset(in_thread or ())
        self.training = StagedFace(self._stage, self._mock.training, chosen)
        self.sampling = StagedFace(self._stage, self._mock.sampling, chosen)
        self.weights = StagedFace(self._stage, self._mock.weights, chosen)
        self._with_child = child
        self._child: subprocess.Popen[bytes] | None = None
        _hold_places(self._stage)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mock, name)

    async def start(self, context: Any) -> None:
        await self._mock.start(context)
        if not self._with_child:
            return
        script = "import sys; sys.stdin.read()"
        self._child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE)
        threading.Thread(target=self._supervise, args=(context, self._child), daemon=True).start()
        (self._folder / "child").write_text(str(self._child.pid))

    def _supervise(self, context: Any, child: subprocess.Popen[bytes]) -> None:
        code = child.wait()
        context.lost(f"worker process {child.pid} ended with code {code}")

    async def close(self) -> None:
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.close()
        await self._mock.close()

    def kill(self) -> None:
        self._stage.say("killed")
        self._mock.kill()


def _hold_places(stage: Stage) -> None:
    place = Store._place

    def held(self: Store, *arguments: Any, **named: Any) -> Path:
        stage.block(stage.call("place"))
        return place(self, *arguments, **named)

    Store._place = held  # type: ignore[method-assign]
