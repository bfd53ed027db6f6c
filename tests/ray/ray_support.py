"""Small runs in actors, and what the tests know of their processes."""

from __future__ import annotations

from typing import Any

import ray

from remote_rl.server.ray_server import RayServer
from remote_rl.transports.ray_cluster import NAMESPACE

__all__ = ["SMALL", "RayServer", "actor_of", "in_actor"]

SMALL: dict[str, Any] = {
    "window": 3,
    "embedding_size": 4,
    "hidden_size": 16,
    "initial_scale": 1.0,
}


def actor_of(server: RayServer) -> Any:
    """Its actor's handle."""
    return ray.get_actor(server.target.removeprefix("ray:"), namespace=NAMESPACE)


def in_actor(server: RayServer, function: Any) -> Any:
    """What `function(the ServedRun)` gives, called in the actor's process; the function must be
    one without names of its module."""
    call = actor_of(server).__ray_call__
    return ray.get(call.remote(function), timeout=60)
