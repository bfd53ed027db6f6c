"""What the load tests share: servers that end with the test, and an end for what hangs."""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from load_server import Served


@pytest.fixture(autouse=True)
def end_what_hangs() -> Iterator[None]:
    """A deadlock ends the whole run with a trace of all threads, instead of never."""
    faulthandler.dump_traceback_later(600, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """`serve(backend, **options)`: a server in this process."""
    started: list[Served] = []

    def start(backend: Any, **options: Any) -> Served:
        started.append(Served(backend, **options))
        return started[-1]

    yield start
    for each in started:
        each.stop()
