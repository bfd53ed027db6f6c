"""A mock in a process of its own that has a worker, loses what it runs on, or doesn't start.
Imported in that process too."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

from hosted_mock import HostedMock

from backends.arctic.child import Started
from backends.mock.config import MockConfig


class Fragile(HostedMock):
    """Starts a worker process, and is lost in `sleep`."""

    async def start(self, request: Any, context: Any) -> Started:  # type: ignore[override]
        started = await super().start(request, context)
        code = "import time; time.sleep(1000)"
        worker = subprocess.Popen([sys.executable, "-c", code])
        logging.getLogger("remote_rl.arctic").warning("the worker is %d", worker.pid)
        return started

    async def sleep(self, request: Any, context: Any) -> None:
        context.lost("the cluster is gone")
        await asyncio.Event().wait()


def make(options: dict[str, Any], directory: Path, reports: Any) -> Fragile:
    """refuse: a file; where it is there, there is no engine."""
    refuse = options.pop("refuse")
    if Path(refuse).exists():
        raise ValueError(f"{refuse} is there")
    return Fragile(MockConfig(**options), directory, reports)
