"""Tables of the benchmarks: on the terminal, and in docs/benchmarks.md between their markers."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
_PACKAGES = ("numpy", "aiohttp", "xxhash", "attrs", "safetensors", "ray")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, the first column to the left and the others to the right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        first, *others = cells
        padded = [first.ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(others, widths[1:])]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(head), line(rule), *map(line, rows)])


def machine() -> str:
    """One sentence on where this ran."""
    names = re.findall(r"^model name\s*: (.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    memory = re.search(r"^MemTotal:\s*(\d+)", _read("/proc/meminfo"), re.MULTILINE)
    there = [name for name in _PACKAGES if importlib.util.find_spec(name) is not None]
    installed = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in there)
    return (
        f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}, {os.cpu_count()} cores of "
        f"{names[0] if names else platform.processor()}, "
        f"{int(memory.group(1)) / 2**20 if memory else 0:.0f} GiB, "
        f"{platform.system()} {platform.release().split('-')[0]}, "
        f"Python {platform.python_version()}, {installed}. "
        f"Load average at the end {os.getloadavg()[0]:.1f}."
    )


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8") if Path(path).exists() else ""


def publish(section: str, text: str, *, write: bool) -> None:
    """Prints a section, and with `write` puts it into the page, with what machine it ran on."""
    print(text)
    if not write:
        return
    begin, end = f"<!-- {section}: begin -->", f"<!-- {section}: end -->"
    page = PAGE.read_text(encoding="utf-8")
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"{PAGE.name} has no markers {begin} and {end}")
    body = f"{begin}\n{text}\n\n{machine()}\n{end}"
    PAGE.write_text(before + body + after, encoding="utf-8")
    print(f"wrote {section!r} into {PAGE.name}")
