"""Command line: `remote-rl conformance` (imports commands.values and errors; the client and the
suite in `run`)."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import math
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..errors import InvalidRequestError, UnsupportedError
from .values import add_access, add_backend_options, backend_options

if TYPE_CHECKING:
    from ..client import Session
    from ..run_info import RunInfo
    from ..testing.conformance.runner import Report

NAME = "conformance"
SUMMARY = "check whether a backend or server keeps the contract"
LOG_LEVEL = "error"  # most of what the dispatcher warns of is asked for here
DESCRIPTION = """\
Runs the conformance suite: each operation and option that the target declares must work as the
contract says, and what it does not declare must be refused by name.

A backend by its name runs in this process, with options as for `serve`:

  $ remote-rl conformance mock
  $ remote-rl conformance mine --config mine.toml --set dtype=float32 --tolerance 1e-4

A server or a Ray actor needs --destructive: its weights are reset, trained and reset again;
checkpoints that the suite writes are deleted, others are left alone:

  $ remote-rl conformance http://gpu-box:7700 --destructive --token-file token

While you work on one thing:

  $ remote-rl conformance mine --area Optimizer --area Gradients
  $ remote-rl conformance mine -k "stop and not string" -x

Needs pytest: pip install 'remote-rl[testing]'. docs/conformance.md says how to read a failure.

Exit codes: 0 all passed or skipped, 1 a test failed or the target can't be reached, 2 wrong usage.
"""
_WORDS = {"passed": "ok", "skipped": "skip", "failed": "FAIL"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's own arguments."""
    parser.add_argument(
        "target", help="a backend's name, http://HOST:PORT of a server, or ray:NAME of an actor"
    )
    named = parser.add_argument_group("a backend by its name")
    add_backend_options(named)
    server = parser.add_argument_group("a server")
    server.add_argument(
        "--destructive", action="store_true", help="yes, reset and train what runs there"
    )
    server.add_argument(
        "--takeover", action="store_true", help="revoke another driver's rights to the run"
    )
    add_access(server)
    tests = parser.add_argument_group("which tests, and how strict")
    tests.add_argument("-k", metavar="EXPRESSION", help='of names, as "abort or pause"')
    tests.add_argument(
        "--area", dest="areas", action="append", default=[], metavar="NAME", help="may be repeated"
    )
    tests.add_argument("-x", dest="first", action="store_true", help="stop at the first failure")
    tests.add_argument(
        "--tolerance",
        type=_above_zero,
        default=1e-5,
        metavar="NUMBER",
        help="of logprobs that are the same by contract (%(default)g)",
    )
    tests.add_argument(
        "--learning-rate",
        type=_above_zero,
        default=1e-2,
        metavar="NUMBER",
        help="of steps that must show an effect (%(default)g)",
    )


def _above_zero(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return number


def run(arguments: argparse.Namespace) -> int:
    """Runs the suite and prints a line a test; 1 where one failed."""
    _check(arguments)
    from ..testing.conformance import runner

    runner.check_areas(arguments.areas)
    with _session(arguments) as session:
        printer = _Printer(arguments.debug)
        print(_headline(session._connection.grant.info), flush=True)
        reports = runner.run(
            runner.Target(
                session=session,
                tolerance=arguments.tolerance,
                learning_rate=arguments.learning_rate,
            ),
            heard=printer.show,
            areas=arguments.areas,
            choose=arguments.k,
            stop_at_first=arguments.first,
        )
    if not reports:
        raise InvalidRequestError(
            f"no test is chosen by that; areas are {', '.join(runner.area_names())}", field="k"
        )
    failed = [report for report in reports if report.verdict == "failed"]
    print(_sum(reports))
    for report in failed:
        print(f"FAIL  {report.name}")
    return 1 if failed else 0


def _check(arguments: argparse.Namespace) -> None:
    from ..transports.choice import is_address

    if is_address(arguments.target):
        if not arguments.destructive:
            raise InvalidRequestError(
                f"the suite resets and trains what runs at {arguments.target}; say --destructive "
                "if that is meant",
                field="destructive",
            )
        if arguments.config is not None or arguments.settings:
            raise InvalidRequestError(
                "--config and --set are options of a backend in this process; a server has its own"
            )
    elif "://" not in arguments.target:
        for name in ("destructive", "takeover", "token_file", "ca_file"):
            if getattr(arguments, name):
                option = name.replace("_", "-")
                raise InvalidRequestError(
                    f"--{option} is for a server; {arguments.target!r} runs in this process",
                    field=name,
                )
    if importlib.util.find_spec("pytest") is None:
        raise UnsupportedError(
            "the conformance suite needs pytest: pip install 'remote-rl[testing]'"
        )


@contextlib.contextmanager
def _session(arguments: argparse.Namespace) -> Iterator[Session]:
    """An open session, left without a word about operations that a failed test gave up."""
    from ..client import connect
    from ..transports.choice import is_address
    from .asking import token_for

    with tempfile.TemporaryDirectory(prefix="remote_rl-conformance-") as folder:
        if is_address(arguments.target):
            session = connect(
                arguments.target,
                start=asyncio.run(_start(arguments)),
                takeover=arguments.takeover,
                token=token_for(arguments.target, arguments.token_file),
                ca_file=arguments.ca_file,
            )
        else:
            options = backend_options(arguments.config, arguments.settings)
            session = connect(arguments.target, checkpoint_dir=folder, **options)
        try:
            yield session
            if "reset" in session._connection.grant.info.capabilities.operations:
                session.reset().result()
        finally:
            session.detach()


async def _start(arguments: argparse.Namespace) -> str:
    """Where a driver can begin: at the base, where the backend can go back to it."""
    from ..messages import Describe
    from .asking import ask, transport_of

    transport = transport_of(arguments.target, arguments)
    try:
        info: RunInfo = await ask(transport, Describe(), 5.0)
    finally:
        await transport.close()
    return "base" if "reset" in info.capabilities.operations else "current"


class _Printer:
    """One line a test, under its area; of a failure the rule and what was found."""

    def __init__(self, debug: bool) -> None:
        self._debug = debug
        self._area = ""

    def show(self, report: Report) -> None:
        if report.area != self._area:
            self._area = report.area
            print(report.area)
        line = f"  {_WORDS[report.verdict]:<4}  {report.name}"
        print(line + (f": {report.reason}" if report.verdict == "skipped" else ""), flush=True)
        if report.verdict == "failed":
            found = report.details if self._debug else report.reason
            print(f"        rule: {report.rule}")
            for each in found.rstrip().splitlines():
                print(f"        {each}", flush=True)


def _headline(info: RunInfo) -> str:
    model: Any = info.model
    return (
        f"conformance of {info.backend}: model {model.name}, {model.vocab_size} ids, "
        f"{info.software}"
    )


def _sum(reports: list[Report]) -> str:
    counts = {
        verdict: sum(report.verdict == verdict for report in reports)
        for verdict in ("passed", "skipped", "failed")
    }
    took = sum(report.seconds for report in reports)
    listed = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return f"{len(reports)} tests in {took:.1f} s: {listed}"
