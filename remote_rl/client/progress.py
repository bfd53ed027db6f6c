"""Client: waits for a call, with a line in the terminal while it takes long
(imports progress_line)."""

from __future__ import annotations

import concurrent.futures
import time
from typing import TYPE_CHECKING

from ..progress_line import ProgressLine

if TYPE_CHECKING:
    from .operation import Call

_PATIENCE = 2.0
_REFRESH = 0.5


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
