"""Command line: `remote-rl`, its subcommands and exit codes (imports commands and errors)."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from .__about__ import __version__
from .commands import COMMANDS
from .commands.logs import FORMATS, LEVELS, configure
from .errors import InvalidRequestError, RemoteRLError

log = logging.getLogger("remote_rl.cli")

DESCRIPTION = """\
One protocol between RL post-training loops and the engines that train and sample.

  remote-rl demo              trains a small policy here, in seconds; the first thing to try
  remote-rl serve mock        runs a backend and serves it; needs nothing but this package
  remote-rl info URL          says what a server runs and offers
  remote-rl top URL           shows what it does, live
  remote-rl conformance T     checks whether a backend or a server keeps the contract

then, in Python:

  from remote_rl import connect
  with connect("http://127.0.0.1:7700") as rl:
      ...
"""
EPILOG = """\
exit codes:
  0    done; serve: stopped by a signal; top: ended by Ctrl-C
  1    failed, with one sentence on stderr (--debug shows the traceback)
  2    wrong usage: an argument, an option of the backend, a file that can't be read
  130  interrupted by Ctrl-C

The token of a server comes from --token-file or the environment's REMOTE_RL_TOKEN.
"""


class _Once(argparse.Action):
    """Stores a value, and refuses a second one: the first would be ignored."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        given = vars(namespace).setdefault("_given", set())
        if option_string is not None and self.dest in given:
            raise argparse.ArgumentError(self, "given twice; give it once")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options
        )
        self.register("action", None, _Once)
        self.register("action", "store", _Once)


def build_parser() -> argparse.ArgumentParser:
    """The parser of `remote-rl` and all its subcommands."""
    parser = _Parser(prog="remote-rl", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"remote-rl {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.NAME, help=command.SUMMARY, description=command.DESCRIPTION
        )
        command.add_arguments(subparser)
        subparser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
        subparser.add_argument(
            "--log-level",
            choices=LEVELS,
            default=getattr(command, "LOG_LEVEL", "info"),
            help="on stderr (%(default)s)",
        )
        subparser.add_argument(
            "--log-format",
            choices=FORMATS,
            default="text",
            help="json: one object a line (%(default)s)",
        )
        subparser.set_defaults(run=command.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit code."""
    _open_what_is_closed()
    parsed = build_parser().parse_args(arguments)
    configure(parsed.log_level, parsed.log_format)
    try:
        code: int = parsed.run(parsed)
        sys.stdout.flush()  # a reader that has gone shows here at the latest
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` has read enough; the interpreter's own flush must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        code = 2 if isinstance(error, InvalidRequestError) else 1
        if parsed.log_format == "json":
            _log(error, parsed.debug)
            return code
        if parsed.debug:
            raise
        if isinstance(error, RemoteRLError):
            _explain(error)
            return code
        print(f"remote-rl: {type(error).__name__}: {error} (--debug shows where)", file=sys.stderr)
    return code


def _open_what_is_closed() -> None:
    """A process that was started without stdout or stderr writes to nobody, and goes on."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for good


def _log(error: Exception, debug: bool) -> None:
    """The failure as the last line of a log that a program reads."""
    causes, cause = [], error.__cause__
    while isinstance(cause, RemoteRLError):
        causes.append(f"{type(cause).__name__}: {cause}")
        cause = cause.__cause__
    extra = {"error": type(error).__name__, **({"because": causes} if causes else {})}
    log.error("%s", error, exc_info=error if debug else None, extra=extra)


def _explain(error: RemoteRLError) -> None:
    print(f"remote-rl: {type(error).__name__}: {error}", file=sys.stderr)
    cause = error.__cause__
    while isinstance(cause, RemoteRLError):
        print(f"  because {type(cause).__name__}: {cause}", file=sys.stderr)
        cause = cause.__cause__
