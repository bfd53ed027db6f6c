"""What the tests of faults share: small runs, and the support modules of tests/http."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# lossy_proxy, command_support, http_support; dispatcher_fakes
sys.path += [str(Path(__file__).parent.parent / folder) for folder in ("http", "dispatcher")]


@pytest.fixture(autouse=True)
def end_what_hangs() -> Iterator[None]:
    """A test that waits for ever ends the whole session, with every thread's traceback."""
    faulthandler.dump_traceback_later(
        2400 if os.environ.get("REMOTE_RL_NIGHTLY") == "1" else 600, exit=True
    )
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def without_a_warning_for_each_fault() -> Iterator[None]:
    """The client says of each lost message that it tries again."""
    logger = logging.getLogger("remote_rl.client")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)
