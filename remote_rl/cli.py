"""Command line: `remote-rl`, its subcommands and exit codes (imports commands and errors).

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from .__about__ import __version__
from .commands import COMMANDS
from .errors import InvalidRequestError, RemoteRLError

DESCRIPTION = """\
One protocol between RL post-training loops and the engines that train and sample.

  remote-rl serve mock        runs a backend and serves it; needs nothing but this package
  remote-rl info URL          says what a server runs and offers

then, in Python:

  from remote_rl import connect
  with connect("http://127.0.0.1:7700") as rl:
      ...
"""
_LEVELS = ("debug", "info", "warning", "error")


def build_parser() -> argparse.ArgumentParser:
    """The parser of `remote-rl` and all its subcommands."""
    parser = argparse.ArgumentParser(
        prog="remote-rl",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"remote-rl {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.NAME,
            help=command.SUMMARY,
            description=command.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_arguments(subparser)
        subparser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
        subparser.add_argument(
            "--log-level", choices=_LEVELS, default="info", help="on stderr (%(default)s)"
        )
        subparser.set_defaults(run=command.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit code."""
    parsed = build_parser().parse_args(arguments)
    _configure_logging(parsed.log_level)
    try:
        code: int = parsed.run(parsed)
    except KeyboardInterrupt:
        return 130
    except RemoteRLError as error:
        if parsed.debug:
            raise
        _explain(error)
        return 2 if isinstance(error, InvalidRequestError) else 1
    except Exception as error:
        if parsed.debug:
            raise
        print(f"remote-rl: {type(error).__name__}: {error} (--debug shows where)", file=sys.stderr)
        return 1
    return code


def _explain(error: RemoteRLError) -> None:
    print(f"remote-rl: {type(error).__name__}: {error}", file=sys.stderr)
    cause = error.__cause__
    while isinstance(cause, RemoteRLError):
        print(f"  because {type(cause).__name__}: {cause}", file=sys.stderr)
        cause = cause.__cause__


def _configure_logging(level: str) -> None:
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    if level != "debug":  # one line a request says nothing that the dispatcher's log doesn't
        logging.getLogger("remote_rl.server.access").setLevel(logging.WARNING)
