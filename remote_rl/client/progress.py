"""Client: waits for a call, with a line in the terminal while it takes long
(imports progress_line)."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from ..progress_line import ProgressLine

if TYPE_CHECKING:
    from .operation import Call

_PATIENCE = 2.0
_REFRESH = 0.5


def watched_result(call: Call, timeout: float | None) -> None:
    """Waits until the call has ended; `TimeoutError` after `timeout` seconds."""
    start = time.monotonic()
    if call.ending.wait(_PATIENCE if timeout is None else min(_PATIENCE, timeout)):
        return
    line = ProgressLine()
    try:
        while True:
            spent = time.monotonic() - start
            left = math.inf if timeout is None else timeout - spent
            if left <= 0:
                raise TimeoutError(
                    f"{call.row.name} has not ended after {timeout:g} s; it goes on, ask again"
                )
            line.show(_describe(call, spent))
            step = min(left, _REFRESH if line.enabled else math.inf)
            if call.ending.wait(None if step == math.inf else step):
                return
    finally:
        line.clear()


def _describe(call: Call, seconds: float) -> str:
    text = f"remote_rl: {call.row.name} {seconds:.0f} s"
    report = call.progress
    if report is not None:
        of = f"/{report.total:g}" if report.total is not None else ""
        text += f", {report.what} {report.done:g}{of}"
    return text
