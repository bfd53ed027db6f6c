"""Testing: what every conformance class has: the fixtures and what may be overridden (imports
pytest, the client, probe)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import pytest

from ...client import Session
from .probe import Probe


class Conformance:
    """Base of the classes; override in a subclass or with fixtures of the same names.

    conformance_session: the fixture that must be given, of any scope: an open driver's session. It
    is shared by all tests of that scope, since a start may take a minute; each test begins with
    `reset` where the backend declares it.
    tolerance: how far logprobs may lie apart that are the same by contract.
    learning_rate: of the steps that have to show an effect.
    skips: names of tests (without parameters) to the reasons for leaving them out.
    """

    tolerance: ClassVar[float] = 1e-5
    learning_rate: ClassVar[float] = 1e-2
    skips: ClassVar[Mapping[str, str]] = {}

    @pytest.fixture
    def probe(self, request: pytest.FixtureRequest) -> Iterator[Probe]:
        """The session as the tests use it, cleared of what earlier ones left."""
        unknown = sorted(name for name in self.skips if not hasattr(self, name))
        if unknown:
            pytest.fail(f"skips names {unknown[0]!r}, which is no test of {type(self).__name__}")
        reason = self.skips.get(request.function.__name__)
        if reason is not None:
            pytest.skip(reason)
        try:
            session: Session = request.getfixturevalue("conformance_session")
        except pytest.FixtureLookupError as error:
            if error.argname != "conformance_session":
                raise
            pytest.fail(
                "there is no fixture conformance_session: write one, in this module or a "
                "conftest.py, that yields an open session of the target; see docs/conformance.md"
            )
        info = session._connection.grant.info
        probe = Probe(session, info, self.tolerance, self.learning_rate)
        probe.begin()
        try:
            yield probe
        finally:
            probe.end()
