"""The mock backend as an engine in a process of its own: what `Child` and `host` carry can be shown
without an engine that takes a minute to start. Imported in that process too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backends.arctic.child import Started
from backends.mock.backend import MockBackend
from backends.mock.config import MockConfig


class HostedMock(MockBackend):
    """As `host` wants an engine: `start` takes a request, versions are reported."""

    def __init__(self, config: MockConfig, directory: Path, reports: Any) -> None:
        super().__init__(config)
        self._reports = reports

    async def start(self, request: Any, context: Any) -> Started:  # type: ignore[override]
        await super().start(context)
        self._reports.serving(*self.sampler_version())
        for name in ("sync", "push"):
            setattr(self.weights, name, self._reporting(getattr(self.weights, name)))
        self.reset = self._reporting(self.reset)  # type: ignore[method-assign]
        return Started(devices=self.devices)

    def _reporting(self, method: Any) -> Any:
        async def called(request: Any, context: Any) -> Any:
            result = await method(request, context)
            self._reports.serving(*self.sampler_version())
            return result

        return called


def make(options: dict[str, Any], directory: Path, reports: Any) -> HostedMock:
    return HostedMock(MockConfig(**options), directory, reports)
