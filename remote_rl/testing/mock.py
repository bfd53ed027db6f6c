"""Testing: the mock for unit tests of loops, in process and behind a real server (imports errors,
registry, loopback, call_log; the client in `MockRuns`).

Nothing here needs pytest: `MockServer` serves any test framework. `MockRuns` is what the fixtures
of `pytest_plugin` share in one test.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from ..errors import InvalidRequestError
from ..messages import Describe
from ..registry import create_backend
from .call_log import CallLog

if TYPE_CHECKING:
    from ..client import Session
    from ..dispatcher import Dispatcher
    from .faults import Faults
    from .loopback import LoopbackServer

Over: TypeAlias = Literal["inprocess", "http"]

#: options of the mock by the name of a profile: "fast" is small and starts in a hundredth of a
#: second, "full" is the mock as it comes, which learns more
PROFILES: dict[str, dict[str, Any]] = {
    "fast": {"embedding_size": 16, "hidden_size": 64},
    "full": {},
}
#: so that a fault "hang" costs a test seconds and not minutes
STALL_SECONDS = 30.0
_OVER = ("inprocess", "http")
#: what only a client has, and a server hasn't
CLIENT_OPTIONS = frozenset({"over", "start", "transport_faults"})


def fault(
    operation: str,
    call: int = 1,
    *,
    error: str | type[Exception] | Exception = "BackendError",
    when: Literal["before", "after"] = "before",
) -> dict[str, Any]:
    """One failure on purpose, for the mock's `faults=[...]`.

    operation: whose; "start" is the backend's own. call: which one of that operation, from 1.
    error: an exception, its class, the name of a class of `remote_rl.errors`, or "hang", which
    reports nothing until it counts as stalled. "RunLostError" ends the run, as a death does.
    when: before the operation does anything, or after it has done everything.
    """
    return {"operation": operation, "call": call, "error": error, "when": when}


class MockServer:
    """A mock run behind a real HTTP server on a free loopback port, in threads of this process.

    url: for the code under test. calls: what reached the mock, of all runs that were here.
    budget_bytes: what it keeps for a client, `remote-rl serve --budget`.
    options: the mock's own, over those of the profile.

        with MockServer(seed=3) as server:
            train(server.url)
        assert server.calls.count("optim_step") == 10
    """

    def __init__(
        self,
        *,
        calls: CallLog | None = None,
        checkpoint_dir: str | Path | None = None,
        lease_seconds: float = 60.0,
        stall_timeout: float = STALL_SECONDS,
        budget_bytes: int | None = None,
        profile: str = "fast",
        **options: Any,
    ) -> None:
        self.calls = CallLog() if calls is None else calls
        self._run_options: dict[str, Any] = {
            "checkpoint_dir": checkpoint_dir,
            "lease_seconds": lease_seconds,
            "stall_timeout": stall_timeout,
        }
        if budget_bytes is not None:
            self._run_options["budget_bytes"] = budget_bytes
        self._mock_options = {"profile": profile, **options}
        self._server = self._serve(0)
        self.url = self._server.url

    def restart(self, **changes: Any) -> None:
        """What a restarted server is: the run is gone, as in a crash, and a new one is served at
        the same address, with the same options but for `changes` and without the faults, and with
        the same directory of checkpoints. Who held the old run gets `RunLostError`."""
        self.crash()
        self._mock_options = {**self._mock_options, "faults": (), **changes}
        self._server = self._serve(self._server.port)

    def crash(self) -> None:
        """The run and its server are gone; nobody is told. `restart` brings a new one."""
        self._server.stop(quietly=True)

    def stop(self) -> None:
        """Ends the run and its server: who waits for an operation gets `RunLostError`."""
        self._server.stop()

    @property
    def dispatcher(self) -> Dispatcher:
        """The run that is served now, for tests that look inside."""
        return self._server.dispatcher

    @property
    def driven(self) -> bool:
        """Whether some session still holds the run."""
        server = self._server
        return not server.stopped and bool(server.run(server.dispatcher.handle(Describe())).driver)

    def _serve(self, port: int) -> LoopbackServer:
        from .loopback import LoopbackServer

        backend = create_mock(self.calls, **self._mock_options)
        return LoopbackServer(backend, port=port, **self._run_options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"MockServer({self.url!r})"


def create_mock(calls: CallLog, profile: str = "fast", **options: Any) -> Any:
    """A mock that has not been started and logs to `calls`."""
    if profile not in PROFILES:
        raise InvalidRequestError(
            f"there is no profile {profile!r} of the mock; there are {', '.join(PROFILES)}",
            field="profile",
        )
    return create_backend("mock", {"call_log": calls.records, **PROFILES[profile], **options})


class MockRuns:
    """Sessions and servers of one test; `close` ends them and raises what nobody has looked at.

    defaults: options of every session and server that the test opens. folder: where each run has
    a directory for checkpoints, unless it is given one.
    """

    def __init__(self, folder: Path, defaults: dict[str, Any]) -> None:
        self.calls = CallLog()
        self._folder = folder
        self._runs = 0
        self._defaults = defaults
        self._sessions: list[Session] = []
        self._servers: list[tuple[MockServer, bool]] = []
        self._failed = False

    def connect(self, **options: Any) -> Session:
        """A driver's session on a new run."""
        session = self._connect(**{**self._defaults, **options})
        self._sessions.append(session)
        return session

    def _connect(
        self,
        *,
        over: Over = "inprocess",
        start: str | None = None,
        transport_faults: Faults | None = None,
        lease_seconds: float | None = None,
        stall_timeout: float = STALL_SECONDS,
        checkpoint_dir: Any = ...,
        **options: Any,
    ) -> Session:
        from ..client import connect

        if over not in _OVER:
            raise InvalidRequestError(f"over must be one of {_OVER}, not {over!r}", field="over")
        client: dict[str, Any] = {
            "start": start,
            "wrap_transport": None if transport_faults is None else transport_faults.wrap,
        }
        run: dict[str, Any] = {
            "stall_timeout": stall_timeout,
            "checkpoint_dir": self._own_folder() if checkpoint_dir is ... else checkpoint_dir,
        }
        if over == "inprocess":
            if lease_seconds is not None:
                raise InvalidRequestError(
                    "lease_seconds= is for over='http': a session in this process ends with its "
                    "run, and its lease never runs out",
                    field="lease_seconds",
                )
            return connect(create_mock(self.calls, **options), **run, **client)
        if lease_seconds is not None:
            run["lease_seconds"] = lease_seconds
        server = MockServer(calls=self.calls, **run, **options)
        self._servers.append((server, True))
        return connect(server.url, **client)

    def serve(self, *, leave_open: bool = False, **options: Any) -> MockServer:
        """A server of a new run. leave_open: the test may end while a session holds it."""
        defaults = {
            name: value for name, value in self._defaults.items() if name not in CLIENT_OPTIONS
        }
        place: dict[str, Any] = {"checkpoint_dir": self._own_folder()}
        server = MockServer(calls=self.calls, **{**place, **defaults, **options})
        self._servers.append((server, leave_open))
        return server

    def _own_folder(self) -> Path:
        self._runs += 1
        return self._folder / f"checkpoints-{self._runs}"

    def test_failed(self, error: BaseException) -> None:
        """The test's own failure is the one to see; what failed before it becomes its notes."""
        self._failed = True
        for session in self._sessions:
            failure = session._connection.failures.first(lambda call: True)
            if failure is not None:
                said = "; ".join(getattr(failure, "__notes__", ()))
                error.add_note(f"before that failed {type(failure).__name__}: {failure} ({said})")

    def close(self) -> None:
        """Ends everything. After a passed test, raises the first failure of an operation that
        nobody looked at, or `AssertionError` for a server that the code under test did not
        leave."""
        problems: list[Exception] = []
        for session in self._sessions:
            try:
                if self._failed:
                    session.detach()
                else:
                    session.close()
            except Exception as error:  # noqa: BLE001 - raised below, once everything is closed
                problems.append(error)
        for server, may_be_held in self._servers:
            if server.driven and not may_be_held and not self._failed:
                problems.append(_left_open(server))
            server.stop()
        if problems:
            for other in problems[1:]:
                problems[0].add_note(f"besides: {other!r}")
            raise problems[0]


def _left_open(server: MockServer) -> AssertionError:
    return AssertionError(
        f"the test ended while a session still held the run at {server.url}; on a real server its "
        "lease would keep the next driver out: use `with connect(...)` or close(), or say "
        "leave_open=True where that is meant"
    )
