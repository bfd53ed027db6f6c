"""Testing: the pytest plug-in: the mock as fixtures, with faults and a call log (imports pytest;
testing.mock when a fixture is used).

It is loaded in every pytest session of an environment that has remote-rl, so importing it imports
nothing else, and every name that it gives to pytest begins with `remote_rl`.
docs/testing-your-loop.md teaches it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ..client import Session
    from .call_log import CallLog
    from .mock import MockRuns, MockServer

_RUNS = pytest.StashKey["MockRuns"]()
_MARKER = """\
remote_rl(**options): options of the mock for the remote_rl_* fixtures of this test, such as \
seed=3, faults=[fault("generate", call=2)], latency=0.1, over="http", profile="full"."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--remote-rl-over`, and ini options for a whole project."""
    parser.getgroup("remote_rl", "remote_rl").addoption(
        "--remote-rl-over",
        choices=("inprocess", "http"),
        help="how the sessions of remote_rl_mock and remote_rl_connect reach the mock "
        "(default: the ini option remote_rl_over, else inprocess)",
    )
    parser.addini("remote_rl_over", "like --remote-rl-over", default="inprocess")
    parser.addini("remote_rl_profile", "the mock's size in tests: fast or full", default="fast")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker."""
    config.addinivalue_line("markers", _MARKER)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """What failed unseen before the test failed becomes a note of its failure."""
    try:
        yield
    except BaseException as error:
        if _RUNS in item.stash:
            item.stash[_RUNS].test_failed(error)
        raise


@pytest.fixture
def _remote_rl_runs(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[MockRuns]:
    from .mock import MockRuns

    runs = MockRuns(tmp_path, _options(request.node))
    request.node.stash[_RUNS] = runs
    yield runs
    runs.close()


@pytest.fixture
def remote_rl_mock(_remote_rl_runs: MockRuns) -> Session:
    """A session on a small mock in this process, as `connect` returns it, closed after the test; a
    failed operation that the test did not look at is then raised."""
    return _remote_rl_runs.connect()


@pytest.fixture
def remote_rl_connect(_remote_rl_runs: MockRuns) -> Callable[..., Session]:
    """`remote_rl_connect(**options)`: a session on a new run with options of its own.

    Options of the mock: seed, faults, latency, vocab_size and the others of its `connect`.
    over: "inprocess" or "http", a real server on loopback. profile: "fast" or "full".
    transport_faults: `remote_rl.testing.faults.Faults`. start: "base" or a checkpoint's name.
    checkpoint_dir: each run has one of its own, unless it is given. stall_timeout: 30 s.
    """
    return _remote_rl_runs.connect


@pytest.fixture
def remote_rl_server(_remote_rl_runs: MockRuns) -> MockServer:
    """The mock behind a real HTTP server on a free port, for code that takes a URL: `.url`,
    `.calls`, `.crash()`, `.restart()`. A session that still holds it after the test is an error."""
    return _remote_rl_runs.serve()


@pytest.fixture
def remote_rl_serve(_remote_rl_runs: MockRuns) -> Callable[..., MockServer]:
    """`remote_rl_serve(**options)`: such a server with options of its own; besides the mock's
    lease_seconds, stall_timeout, budget_bytes, checkpoint_dir, profile and leave_open."""
    return _remote_rl_runs.serve


@pytest.fixture
def remote_rl_calls(_remote_rl_runs: MockRuns) -> CallLog:
    """What reached the mock in this test, over all its sessions and servers:
    `remote_rl_calls.names("optim_step", "sync")`, `.count("generate")`, `.requests(...)`."""
    return _remote_rl_runs.calls


def _options(item: pytest.Item) -> dict[str, Any]:
    """Of the marker, the closest first, over those of the command line and of the project."""
    config = item.config
    options = {
        "over": config.getoption("remote_rl_over") or config.getini("remote_rl_over"),
        "profile": config.getini("remote_rl_profile"),
    }
    for mark in reversed(list(item.iter_markers("remote_rl"))):
        if mark.args:
            raise pytest.UsageError(
                f"{item.nodeid}: pytest.mark.remote_rl takes options by name, such as seed=3, not "
                f"{mark.args[0]!r}"
            )
        options.update(mark.kwargs)
    return options
