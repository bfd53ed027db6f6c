"""Command line: a curve in the terminal (imports plotext where it is installed)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_WIDTH, _HEIGHT = 80, 18
_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII = "_.:-=+*#"


def curve(values: Sequence[float], title: str) -> str:
    """A picture of numbers from 0 to 1 in their order: plotext's where it is installed (`pip
    install 'remote-rl[demo]'`), else one line of blocks, higher ones for larger numbers."""
    plotext = _plotext()
    if plotext is None or not _prints(_BLOCKS):
        return f"{title}, from 0 to 1:  {spark_line(values)}"
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(_WIDTH, _HEIGHT)
    plotext.plot(range(len(values)), list(values))
    plotext.ylim(0, 1)
    plotext.title(title)
    drawn: Any = plotext.uncolorize(plotext.build())
    return str(drawn)


def _plotext() -> ModuleType | None:
    try:
        import plotext
    except ImportError:
        return None
    module: ModuleType = plotext
    return module


def spark_line(values: Sequence[float], width: int = 50) -> str:
    """At most `width` characters, each the mean of its share of the values; plain ASCII where
    the terminal's encoding has no blocks."""
    columns = min(width, len(values))
    levels = _BLOCKS if _prints(_BLOCKS) else _ASCII
    line = ""
    for column in range(columns):
        share = values[column * len(values) // columns : (column + 1) * len(values) // columns]
        level = int(sum(share) / len(share) * len(levels))
        line += levels[max(0, min(level, len(levels) - 1))]
    return line


def _prints(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
