"""Sessions of the arctic backend on tiny models, over every transport."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from backends.arctic import create
from remote_rl import Session, connect
from remote_rl.testing import LoopbackServer

TRANSPORTS = ("inprocess", "http", "ray")

LORA: dict[str, Any] = {
    "rank": 8,
    "alpha": 16,
    "targets": [
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    ],
}


@attrs.frozen
class Setup:
    """An engine: how many ranks at which ZeRO stage, how many vLLM engines; all
    weights, or adapters; how a sync carries weights."""

    architecture: str
    ranks: int
    stage: int
    engines: int
    lora: bool = False
    path: str = "auto"

    def __str__(self) -> str:
        lora = "-lora" if self.lora else ""
        path = "" if self.path == "auto" else f"-{self.path}"
        return f"{self.architecture}-{self.ranks}x-zero{self.stage}-{self.engines}e{lora}{path}"

    def options(self, model: Path) -> dict[str, Any]:
        """Keyword arguments of the backend."""
        training = {"ranks": self.ranks, "zero_stage": self.stage}
        return {
            "model": str(model),
            "training": training | ({"lora": LORA} if self.lora else {}),
            "sampling": {"engines": self.engines},
            "weights": {"path": self.path},
            "placement": {"device": "cpu"},
        }


SETUPS = (
    Setup("qwen3", 1, 0, 1),
    Setup("llama", 2, 2, 2),
    Setup("qwen3", 2, 3, 1),
    Setup("llama", 1, 3, 2, path="gloo"),
    Setup("qwen3", 2, 2, 1, lora=True),
)


@contextmanager
def opened(transport: str, options: dict[str, Any], checkpoints: Path) -> Iterator[Session]:
    """A session with a run of its own, which ends with it."""
    if transport == "inprocess":
        with connect("arctic", checkpoint_dir=checkpoints, **options) as session:
            yield session
    elif transport == "http":
        server = LoopbackServer(create(**options), checkpoint_dir=checkpoints)
        try:
            with connect(server.url, start="base") as session:
                yield session
        finally:
            server.stop()
    else:
        with _through_ray(options, checkpoints) as session:
            yield session


@contextmanager
def _through_ray(options: dict[str, Any], checkpoints: Path) -> Iterator[Session]:
    from own_cluster import own_cluster  # of tests/ray, which conftest.py puts on the path

    from remote_rl.server.ray_server import RayServer

    with own_cluster() as started:
        options = {**options, "placement": {"device": "cpu", "address": started.address}}
        server = RayServer("arctic", name="arctic", checkpoint_dir=checkpoints, **options)
        try:
            with connect(server.target, start="base") as session:
                yield session
        finally:
            server.stop()
