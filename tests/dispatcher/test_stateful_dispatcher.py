"""The dispatcher against a plain model of it: whatever clients, backend and clock do."""

import os

from hypothesis import settings
from stateful_machine import DispatcherMachine

NIGHTLY = os.environ.get("REMOTE_RL_NIGHTLY") == "1"

TestDispatcher = DispatcherMachine.TestCase
TestDispatcher.settings = settings(
    max_examples=800 if NIGHTLY else 120, stateful_step_count=50 if NIGHTLY else 30
)
