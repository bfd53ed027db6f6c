"""Arctic backend: what any backend does whose engine lives in a process of its own (imports child
and the contract)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import attrs

from remote_rl.errors import BackendError
from remote_rl.ops import OPERATIONS
from remote_rl.protocol import OperationContext, Sampling, Training, WeightSync
from remote_rl.requests import Reset, Sleep, Wake
from remote_rl.types import Devices

from .child import Child, Facts, Started

#: operations that start the engine anew where it is gone
_REVIVING = frozenset({"load", "reset"})
_WITH_DIRECTORY = frozenset({"save", "load", "export"})

#: gets version and label whenever the sampler serves other weights; version None where unknown
Served = Callable[[int | None, int | str | None], None]


class Face:
    """The operations of one face, each a coroutine method that `call` executes."""

    def __init__(self, face: str, call: Callable[..., Any]) -> None:
        for row in OPERATIONS.values():
            if row.face == face:
                setattr(self, row.name, functools.partial(call, row.name))


class HostedBackend:
    """Forwards operations to the engine's process. One that dies fails what runs; `load` and
    `reset` start another, whose sampler serves nothing before it got weights.

    make_child: an engine's process, not started; its arguments are the version that stands for the
    base weights, None for none, and what hears of served weights.
    """

    def __init__(self, make_child: Callable[[int | None, Served], Child]) -> None:
        self._make_child = make_child
        self._child: Child | None = None
        self._started: Started | None = None
        self._serves: tuple[int | None, int | str | None] = (None, None)
        self._paused = False
        self._base = 0  # the version that the base weights had when they were current
        self._training = cast(Training, Face("training", self._call))
        self._sampling = cast(Sampling, Face("sampling", self._call))
        self._weights = cast(WeightSync, Face("weights", self._call))

    @property
    def training(self) -> Training:
        """The trainer."""
        return self._training

    @property
    def sampling(self) -> Sampling:
        """The sampler."""
        return self._sampling

    @property
    def weights(self) -> WeightSync:
        """The path between them."""
        return self._weights

    def sampler_version(self) -> tuple[int | None, int | str | None]:
        """Version and label that the sampler serves; version None where unknown."""
        return self._serves

    @property
    def devices(self) -> Devices | None:
        """What the engine computes on, by what its start answered."""
        return None if self._started is None else self._started.devices

    @property
    def withheld(self) -> frozenset[str]:
        """Options of `SamplingParams` that its start found can't be offered with this model."""
        return frozenset() if self._started is None else self._started.withheld

    # -- life ---------------------------------------------------------------------------------

    async def start(self, context: OperationContext) -> None:
        """Starts the engine."""
        self._base = context.version
        await self._launch(context, context.version)

    async def close(self) -> None:
        """Ends the engine in order."""
        if self._child is not None:
            await self._child.close()

    def kill(self) -> None:
        """Ends it at once."""
        if self._child is not None:
            self._child.kill()

    async def _launch(self, context: OperationContext, base_version: int | None) -> Child:
        child = self._child = self._make_child(base_version, self._hear_serving)
        try:
            child.spawn()
            facts = attrs.evolve(_facts("start", context), version=self._base)
            self._started = await child.call(facts, None, context)
            if self._paused:
                await child.call(_facts("pause", context), None, context)
        except BaseException:
            child.ended = child.ended or "its start failed"
            child.kill()
            await child.close()
            raise
        return child

    def _hear_serving(self, version: int | None, label: int | str | None) -> None:
        self._serves = (version, label)

    # -- operations ---------------------------------------------------------------------------

    async def reset(self, request: Reset, context: OperationContext) -> None:
        """Back to the base weights, on new workers where the old ones died."""
        await self._call("reset", request, context)
        self._base = context.next_version

    async def sleep(self, request: Sleep, context: OperationContext) -> None:
        """One half gives its memory back, where the device lets it."""
        await self._call("sleep", request, context)

    async def wake(self, request: Wake, context: OperationContext) -> None:
        """Undoes `sleep`, which operations do by themselves."""
        await self._call("wake", request, context)

    async def _call(self, operation: str, request: Any, context: OperationContext) -> Any:
        child = self._child
        if child is None:
            raise BackendError(f"{operation} failed: the engine was not started")
        if operation in _REVIVING and not await child.alive():
            await child.close()
            child = await self._launch(context, None)
        result = await child.call(_facts(operation, context), request, context)
        if operation in ("pause", "resume"):
            self._paused = operation == "pause"
        return result


def _facts(operation: str, context: OperationContext) -> Facts:
    return Facts(
        operation=operation,
        request_id=context.request_id,
        version=context.version,
        next_version=context.next_version,
        directory=context.directory if operation in _WITH_DIRECTORY else None,
        seed=context.seed,
    )
