"""What the tests with processes share."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_support import NIGHTLY, Playground

from remote_rl import Batch

# the server with an injected clock is the client tests' own
sys.path.append(str(Path(__file__).parents[1] / "client"))


@pytest.fixture(autouse=True)
def end_what_hangs() -> Iterator[None]:
    """A test that waits for ever ends the whole session, with every thread's traceback."""
    faulthandler.dump_traceback_later(1200 if NIGHTLY else 120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def playground(tmp_path: Path) -> Iterator[Playground]:
    """Starts processes that end with the test."""
    playground = Playground(tmp_path)
    yield playground
    playground.end()


@pytest.fixture
def batch() -> Batch:
    """Two prompts, three responses, with advantages."""
    return Batch(
        prompts=[[1, 2], [3]],
        prompt_index=[0, 0, 1],
        responses=[[1, 2, 3], [4], [5, 6]],
        temperature=1.0,
        advantages=[[1.0, -1.0, 0.5], [2.0], [0.25, -0.5]],
        old_logprobs=[[-1.0, -2.0, -1.5], [-0.5], [-2.5, -1.0]],
    )
