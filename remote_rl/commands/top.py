"""Command line: `remote-rl top` (imports commands.asking and top_view; run_info for types)."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from typing import TYPE_CHECKING

from .asking import add_server_arguments, ask, server_of
from .values import positive_seconds

if TYPE_CHECKING:
    from ..run_info import RunStatus

NAME = "top"
SUMMARY = "show what a server does, live"
DESCRIPTION = """\
Shows what a server's run does: rates, operations that run and wait, versions of the weights,
staleness of the samples. Takes no lease, so it disturbs nobody who works there.

  $ remote-rl top http://127.0.0.1:7700

In a terminal it redraws itself until Ctrl-C; elsewhere it prints one block an interval.

  $ remote-rl top http://127.0.0.1:7700 --once           one block; rates since the run began
  $ remote-rl top http://127.0.0.1:7700 --json           one JSON object a line, for programs

Exit codes: 0 after --once, Ctrl-C or a closed pipe, 1 where the server is gone, 2 wrong usage.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's own arguments."""
    add_server_arguments(parser)
    parser.add_argument(
        "--interval",
        type=positive_seconds,
        default=1.0,
        metavar="SECONDS",
        help="between two looks (%(default)g)",
    )
    parser.add_argument("--once", action="store_true", help="one look")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")


def run(arguments: argparse.Namespace) -> int:
    """Shows until it is interrupted."""
    try:
        asyncio.run(_show(arguments))
    except KeyboardInterrupt:
        pass  # how a live view ends
    except BrokenPipeError:  # nobody reads on; nor may the interpreter's last flush fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


async def _show(arguments: argparse.Namespace) -> None:
    from ..messages import Observe
    from .top_view import Rates, as_json, as_lines

    screen = _Screen(live=sys.stdout.isatty() and not arguments.once and not arguments.json)
    earlier: RunStatus | None = None
    seen = time.monotonic()
    async with server_of(arguments) as server:
        while True:
            status: RunStatus = await ask(server, Observe(), arguments.timeout)
            now = time.monotonic()
            rates = Rates.between(earlier, status, now - seen)
            if arguments.json:
                print(json.dumps(as_json(status, rates)), flush=True)
            else:
                screen.show(as_lines(status, rates, server.target))
            if arguments.once:
                return
            earlier, seen = status, now
            await asyncio.sleep(arguments.interval)


class _Screen:
    """Blocks of lines on stdout; live ones are written over the last one."""

    def __init__(self, live: bool) -> None:
        self._live = live
        self._shown = 0

    def show(self, lines: list[str]) -> None:
        """The next block."""
        if not self._live:
            print(("\n" if self._shown else "") + "\n".join(lines), flush=True)
            self._shown = len(lines)
            return
        size = os.get_terminal_size(sys.stdout.fileno())
        cut = [line[: max(1, size.columns - 1)] for line in lines[: max(1, size.lines - 1)]]
        back = f"\x1b[{self._shown}A" if self._shown else ""
        sys.stdout.write(f"{back}\r\x1b[J" + "\n".join(cut) + "\n")
        sys.stdout.flush()
        self._shown = len(cut)
