"""What the tests over Ray share: a cluster of their own, runs in its actors."""

from __future__ import annotations

import faulthandler
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
#: processes to be told and killed; training programs under faults; what a command prints
sys.path += [str(HERE.parent / folder) for folder in ("processes", "faults", "http", "dispatcher")]

from own_cluster import Started, own_cluster  # noqa: E402
from process_support import Playground  # noqa: E402
from ray_support import SMALL, RayServer  # noqa: E402

from remote_rl.server.serve import Limits  # noqa: E402


@pytest.fixture(autouse=True)
def end_what_hangs() -> Iterator[None]:
    """A test that waits for ever ends the whole session, with every thread's traceback."""
    faulthandler.dump_traceback_later(300, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """One for all tests, whose processes know the witness backend."""
    site = tmp_path_factory.mktemp("site")
    _witness_is_a_backend(site)
    with own_cluster(site, HERE) as started:
        yield started


def _witness_is_a_backend(site: Path) -> None:
    """Made known as an installed package's would be."""
    facts = site / "witness-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: witness\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(
        "[remote_rl.backends]\nwitness = witness_backend:WitnessBackend\n"
    )


@pytest.fixture
def serve(cluster: Started, request: pytest.FixtureRequest) -> Iterator[Any]:
    """`serve(**options)`: a small mock in an actor, which ends with the test."""
    servers: list[RayServer] = []

    def start(backend: str = "mock", **options: Any) -> RayServer:
        name = f"run-{os.getpid()}-{secrets.token_hex(4)}"
        mock = SMALL if backend == "mock" else {}
        options.setdefault("limits", Limits(grace=5))
        servers.append(RayServer(backend, name=name, **{**mock, **options}))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def playground(cluster: Started, tmp_path: Path) -> Iterator[Playground]:
    """Starts client processes that end with the test."""
    playground = Playground(tmp_path)
    yield playground
    playground.end()


@pytest.fixture
def server(serve: Any) -> RayServer:
    """One such run."""
    started: RayServer = serve()
    return started
