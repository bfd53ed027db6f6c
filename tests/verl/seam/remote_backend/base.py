"""The abstract class that a plug-in implements, and the registry that finds it by name."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable
from typing import Any, ClassVar


class RemoteBackend(abc.ABC):
    """Six methods; whatever computes is the plug-in's own worker and replica."""

    @classmethod
    @abc.abstractmethod
    def from_config(
        cls, main_config: Any, *, handle: dict[str, Any] | None = None
    ) -> RemoteBackend:
        """The one way to make one: anew on the driver, joined by `handle` elsewhere."""

    @abc.abstractmethod
    def reconnect_handle(self) -> dict[str, Any]:
        """What joins this backend from another process."""

    @abc.abstractmethod
    def destroy(self) -> Any:
        """The end; a coroutine, and may be repeated."""

    @abc.abstractmethod
    async def update_weights(self) -> dict[str, Any]:
        """Trainer to sampler."""

    @abc.abstractmethod
    async def save_checkpoint(self) -> dict[str, Any]:
        """Model and optimizer to storage."""

    @abc.abstractmethod
    def requires_single_forwarder(self) -> bool:
        """Whether there may be one worker and one replica only."""


class RemoteBackendRegistry:
    """Classes by name, and loaders of their forwarder workers."""

    _backends: ClassVar[dict[str, type[RemoteBackend]]] = {}
    _loaders: ClassVar[dict[str, Callable[[], type]]] = {}

    @classmethod
    def register(cls, name: str) -> Callable[[type[RemoteBackend]], type[RemoteBackend]]:
        """A decorator; the same class again is fine, another under its name is not."""

        def add(backend: type[RemoteBackend]) -> type[RemoteBackend]:
            if not issubclass(backend, RemoteBackend):
                raise TypeError(f"{backend} is no RemoteBackend")
            if missing := sorted(backend.__abstractmethods__):
                raise TypeError(f"{backend.__name__} lacks {missing}")
            for method in ("destroy", "update_weights", "save_checkpoint"):
                if not inspect.iscoroutinefunction(getattr(backend, method)):
                    raise TypeError(f"{backend.__name__}.{method} is no coroutine")
            if cls._backends.setdefault(name, backend) is not backend:
                raise ValueError(f"backend {name!r} is {cls._backends[name]!r} already")
            return backend

        return add

    @classmethod
    def register_worker(cls, name: str, loader: Callable[[], type]) -> None:
        """As `register`; `loader` is called when a training starts."""
        if cls._loaders.setdefault(name, loader) is not loader:
            raise ValueError(f"the worker of {name!r} has a loader already")

    @classmethod
    def get(cls, name: str) -> type[RemoteBackend]:
        if name not in cls._backends:
            raise KeyError(f"no backend {name!r}; there are {cls.list()}")
        return cls._backends[name]

    @classmethod
    def create(cls, name: str, main_config: Any) -> RemoteBackend:
        return cls.get(name).from_config(main_config)

    @classmethod
    def list(cls) -> list[str]:
        return sorted(cls._backends)

    @classmethod
    def get_worker(cls, name: str) -> type | None:
        loader = cls._loaders.get(name)
        return None if loader is None else loader()
