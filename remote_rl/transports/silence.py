"""Transport: calls in which nothing moves any more (imports asyncio only)."""

from __future__ import annotations

import asyncio
from types import TracebackType


class Silences:
    """The silences of one event loop's calls, all on one timer: nearly every call ends long before
    it would ring, and to set and cancel one of its own is much of the time of a small call."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.heard: set[Silence] = set()
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, seconds: float) -> Silence:
        """One more, for a `with` within the call's task."""
        return Silence(self, seconds)

    def begin(self, silence: Silence) -> None:
        """Looks at it when it may be over, at the latest."""
        self.heard.add(silence)
        if self._timer is None or silence.end < self._timer.when():
            self._look_at(silence.end)

    def close(self) -> None:
        """Looks no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_at(self, moment: float) -> None:
        self.close()
        self._timer = self.loop.call_at(moment, self._look)

    def _look(self) -> None:
        self._timer = None
        now = self.loop.time()
        for silence in self.heard:
            if silence.end <= now and not silence.over:
                silence.ring()
        ends = [silence.end for silence in self.heard if not silence.over]
        if ends:
            self._look_at(min(ends))


class Silence:
    """Within it, `seconds` without `moved` cancel what runs, and end in `TimeoutError`, as
    `asyncio.timeout` does."""

    def __init__(self, silences: Silences, seconds: float) -> None:
        self._silences = silences
        self._seconds = seconds
        self.over = False
        self.end = 0.0

    def __enter__(self) -> Silence:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a silence is watched within a task")
        self._task, self._cancelling = task, task.cancelling()
        self.moved()
        self._silences.begin(self)
        return self

    def moved(self, count: int = 0) -> None:
        """Something has: the silence begins anew."""
        self.end = self._silences.loop.time() + self._seconds

    def ring(self) -> None:
        """It has lasted too long."""
        self.over = True
        self._task.cancel()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._silences.heard.discard(self)
        # one that was cancelled from elsewhere as well stays cancelled
        alone = self.over and self._task.uncancel() <= self._cancelling
        if alone and kind is asyncio.CancelledError:
            raise TimeoutError from error
