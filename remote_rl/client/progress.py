"""Client: a line in the terminal while a wait is long, and nothing anywhere else (imports sys,
time)."""

from __future__ import annotations

import concurrent.futures
import os
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .operation import Call

_PATIENCE = 2.0
_REFRESH = 0.5


class ProgressLine:
    """Writes over one line of stderr; silent where stderr is no terminal or
    REMOTE_RL_PROGRESS=0."""

    def __init__(self) -> None:
        self.shown = False
        self.enabled = sys.stderr.isatty() and os.environ.get("REMOTE_RL_PROGRESS") != "0"

    def show(self, text: str) -> None:
        """Replaces the line."""
        if self.enabled:
            width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            sys.stderr.write("\r\x1b[K" + text[: width - 1])
            sys.stderr.flush()
            self.shown = True

    def clear(self) -> None:
        """Removes the line."""
        if self.shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self.shown = False


def watched_result(call: Call, timeout: float | None) -> None:
    """Waits until the call has ended; `TimeoutError` after `timeout` seconds."""
    line = ProgressLine()
    start = time.monotonic()
    try:
        if not line.enabled or (timeout is not None and timeout <= _PATIENCE):
            _wait(call, timeout)
            return
        while True:
            spent = time.monotonic() - start
            left = None if timeout is None else timeout - spent
            step = _PATIENCE if spent < _PATIENCE else _REFRESH
            done, _ = concurrent.futures.wait(
                [call.future], step if left is None else max(0.0, min(step, left))
            )
            if done:
                return
            if left is not None and left <= step:
                _wait(call, 0)
            line.show(_describe(call, time.monotonic() - start))
    finally:
        line.clear()


def _wait(call: Call, timeout: float | None) -> None:
    done, _ = concurrent.futures.wait([call.future], timeout)
    if not done:
        raise TimeoutError(
            f"{call.row.name} has not ended after {timeout:g} s; it goes on, ask again"
        )


def _describe(call: Call, seconds: float) -> str:
    text = f"remote_rl: {call.row.name} {seconds:.0f} s"
    report = call.progress
    if report is not None:
        of = f"/{report.total:g}" if report.total is not None else ""
        text += f", {report.what} {report.done:g}{of}"
    return text
