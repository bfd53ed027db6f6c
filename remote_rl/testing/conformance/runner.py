"""Testing: runs the suite on one open session, without a test module (imports errors; pytest
when it runs)."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs

from ...errors import InvalidRequestError, UnknownNameError, nearest

if TYPE_CHECKING:
    import pytest

    from ...client import Session

_MODULE = Path(__file__).with_name("target.py")

Verdict = Literal["passed", "failed", "skipped"]


@attrs.frozen(kw_only=True)
class Report:
    """One test's end. area: its class. name: with its parameters. rule: the sentence that it
    checks. reason: of a skip or failure, in a few words. details: of a failure, with the place."""

    area: str
    name: str
    rule: str
    verdict: Verdict
    seconds: float
    reason: str = ""
    details: str = ""


@attrs.define(kw_only=True)
class Target:
    """What the suite runs on; `run` hands it to the test module."""

    session: Session
    tolerance: float
    learning_rate: float


class Listener:
    """A pytest plug-in: brings the target in and the reports out."""

    def __init__(
        self, target: Target, heard: Callable[[Report], None], areas: Collection[str]
    ) -> None:
        self.target = target
        self._areas = areas
        self.reports: list[Report] = []
        self._heard = heard
        self._rules: dict[str, tuple[str, str]] = {}
        self._parts: dict[str, list[pytest.TestReport]] = {}

    def pytest_configure(self, config: pytest.Config) -> None:
        """For the module's fixtures, and for tracebacks that say the place and no more."""
        config.option.tbstyle = "short"
        config.remote_rl_target = self.target  # type: ignore[attr-defined]

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leaves the areas that were asked for, in their order; remembers what each test says that
        it checks."""
        order = area_names()
        items.sort(key=lambda item: order.index(_area(item)))
        if self._areas:
            items[:] = [item for item in items if _area(item) in self._areas]
        for item in items:
            documented = getattr(getattr(item, "function", None), "__doc__", None) or ""
            self._rules[item.nodeid] = _area(item), " ".join(documented.split())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One report a test, when its teardown is over."""
        parts = self._parts.setdefault(report.nodeid, [])
        parts.append(report)
        if report.when == "teardown":
            told = self._summary(report.nodeid, self._parts.pop(report.nodeid))
            self.reports.append(told)
            self._heard(told)

    def _summary(self, node: str, parts: list[pytest.TestReport]) -> Report:
        failed = [part for part in parts if part.failed]
        skipped = [part for part in parts if part.skipped]
        verdict: Verdict = "failed" if failed else "skipped" if skipped else "passed"
        reason = details = ""
        if failed:
            crash = getattr(failed[0].longrepr, "reprcrash", None)
            reason = crash.message if crash is not None else failed[0].longreprtext
            details = failed[0].longreprtext
        elif skipped:
            longrepr: Any = skipped[0].longrepr
            reason = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
            reason = reason.removeprefix("Skipped: ")
        area, rule = self._rules[node]
        return Report(
            area=area,
            name=node.rpartition("::")[2],
            rule=rule,
            verdict=verdict,
            seconds=sum(part.duration for part in parts),
            reason=reason,
            details=details,
        )


def area_names() -> tuple[str, ...]:
    """The classes of the suite, in their order."""
    from . import Suite

    return tuple(each.__name__ for each in Suite.__bases__)


def check_areas(names: Collection[str]) -> None:
    """Raises `UnknownNameError`, with the nearest one, where a name is no area's."""
    known = area_names()
    for name in names:
        if name not in known:
            raise UnknownNameError(f"there is no area {name!r}; {nearest(name, known)}")


def _area(item: pytest.Item) -> str:
    name: str = getattr(item, "function").__qualname__  # noqa: B009 - only of a test function
    return name.partition(".")[0]


@contextlib.contextmanager
def _plain_environment() -> Iterator[None]:
    """Without plug-ins and options that are meant for the user's own tests."""
    changed = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTEST_PLUGINS": ""}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def run(
    target: Target,
    *,
    heard: Callable[[Report], None] = lambda report: None,
    areas: Collection[str] = (),
    choose: str | None = None,
    stop_at_first: bool = False,
) -> list[Report]:
    """Runs the suite in this process and returns a report for each test that ran.

    heard: is told each report as it comes. areas: names of classes, all where there are none.
    choose: an expression as of pytest -k. The user's own pytest configuration and plug-ins play no
    part. Raises `InvalidRequestError` where `areas` or `choose` are wrong, `RuntimeError` where
    pytest itself fails.
    """
    import pytest

    check_areas(areas)
    listener = Listener(target, heard, areas)
    with tempfile.TemporaryDirectory(prefix="remote_rl-conformance-") as folder:
        given = [
            str(_MODULE),
            *("-c", os.devnull, f"--rootdir={_MODULE.parent}", f"--basetemp={folder}/tests"),
            *("-p", "no:terminal", "-p", "no:cacheprovider", "-p", "no:faulthandler"),
            "--capture=no",
            *(["-k", choose] if choose else []),
            *(["-x"] if stop_at_first else []),
        ]
        with _plain_environment():
            code = pytest.main(given, plugins=[listener])
    ends = pytest.ExitCode
    if code == ends.USAGE_ERROR and choose:
        raise InvalidRequestError(f"{choose!r} is no expression of names, and, or, not", field="k")
    if code not in (ends.OK, ends.TESTS_FAILED, ends.NO_TESTS_COLLECTED):
        raise RuntimeError(f"pytest ended with {ends(code).name}")
    return listener.reports
