"""Testing: the test module of `runner` (imports pytest, the suite)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from . import Suite

if TYPE_CHECKING:
    from ...client import Session
    from .runner import Target


@pytest.fixture(scope="session")
def conformance_session(request: pytest.FixtureRequest) -> Session:
    """The session that the runner was given; it closes it."""
    target: Target = request.config.remote_rl_target  # type: ignore[attr-defined]
    TestTarget.tolerance, TestTarget.learning_rate = target.tolerance, target.learning_rate
    return target.session


class TestTarget(Suite):
    """Every test, on the runner's target."""
