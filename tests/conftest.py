"""What all tests share: hypothesis draws the same examples every time, and a busy machine fails
nothing; REMOTE_RL_NIGHTLY=1 draws many others. What a command does to logging ends with its test.
Commands that tests start can be interrupted, however the tests themselves were started.
"""

import logging
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("remote_rl", deadline=None, derandomize=True)
settings.register_profile("nightly", deadline=None, max_examples=3000)
settings.load_profile("nightly" if os.environ.get("REMOTE_RL_NIGHTLY") == "1" else "remote_rl")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell that starts the tests in the background ignores Ctrl-C, and so would every command
    # that they start
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Commands that run in this process set levels and handlers."""
    root, access = logging.getLogger(), logging.getLogger("remote_rl.server.access")
    levels, handlers = (root.level, access.level), list(root.handlers)
    yield
    root.setLevel(levels[0])
    access.setLevel(levels[1])
    root.handlers[:] = handlers
