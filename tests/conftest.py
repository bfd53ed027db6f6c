"""What all tests share: hypothesis draws the same examples every time, and a busy machine fails
nothing; REMOTE_RL_NIGHTLY=1 draws many others. What a command does to logging ends with its test.
"""

import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("remote_rl", deadline=None, derandomize=True)
settings.register_profile("nightly", deadline=None, max_examples=3000)
settings.load_profile("nightly" if os.environ.get("REMOTE_RL_NIGHTLY") == "1" else "remote_rl")


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Commands that run in this process set levels and handlers."""
    root, access = logging.getLogger(), logging.getLogger("remote_rl.server.access")
    levels, handlers = (root.level, access.level), list(root.handlers)
    yield
    root.setLevel(levels[0])
    access.setLevel(levels[1])
    root.handlers[:] = handlers
