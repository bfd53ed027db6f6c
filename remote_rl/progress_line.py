"""Terminal: one line of it, written over and removed again (imports os and sys)."""

from __future__ import annotations

import os
import sys


class ProgressLine:
    """Writes over one line of stderr; silent where stderr is no terminal or
    REMOTE_RL_PROGRESS=0."""

    def __init__(self) -> None:
        self.shown = False
        shown = sys.stderr is not None and sys.stderr.isatty()  # None in a daemon, closed at birth
        self.enabled = shown and os.environ.get("REMOTE_RL_PROGRESS") != "0"

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
