"""Arctic backend: trainer and sampler as the halves that `placing` moves, and their operations,
each of which holds what it needs (imports placing, trainers, samplers, weight_path and the
contract)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from remote_rl.ops import OPERATIONS
from remote_rl.protocol import OperationContext
from remote_rl.requests import Half, InFlight, Push, PushPart, Sync
from remote_rl.types import SyncReceipt

from .config import ArcticConfig
from .engine_factory import on_cpu
from .placing import SAMPLING, TRAINING, Level, Placing, Sleeper, Told
from .samplers import SamplerPool
from .trainers import TrainerGroup
from .training_face import TrainingFace
from .weight_path import WeightPath


class TrainingHalf:
    """All ranks. Where they are gone there is nothing to move: their operation says so. patience:
    seconds after which ranks that are moved hang, and are ended."""

    def __init__(self, trainers: TrainerGroup, patience: float) -> None:
        self._trainers = trainers
        self._patience = patience

    async def sleep(self) -> None:
        """Their tensors go to host memory."""
        await self._move("sleep")

    async def wake(self, level: Level) -> None:
        """They come back."""
        await self._move("wake")

    async def _move(self, method: str) -> None:
        moving = asyncio.ensure_future(self._moved(method))
        try:
            if not (await asyncio.wait({moving}, timeout=self._patience))[0]:
                self._trainers.give_up(f"the ranks did not {method} within {self._patience:g} s")
            await moving
        finally:
            moving.cancel()

    async def _moved(self, method: str) -> None:
        if await self._trainers.alive():
            await self._trainers.everywhere(method, context=_SILENT)


class _Silent:
    """Whoever waits for a move tells of it."""

    def progress(self, done: float, total: float | None = None, what: str = "") -> None:
        """Not heard."""


_SILENT: Any = _Silent()


class Still(Placing):
    """Of halves that have no memory to give back, as on a CPU: all of it is a no-op."""

    async def sleep(self, half: Half) -> None:
        """Nothing."""

    async def wake(self, half: Half, told: Told) -> None:
        """Nothing."""


def placing_of(config: ArcticConfig, training: Sleeper, sampling: Sleeper) -> Placing:
    """How a run's halves share its devices."""
    if on_cpu(config):
        return Still(training, sampling, exclusive=False)
    placement = config.placement
    return Placing(training, sampling, exclusive=placement.colocated and placement.swap)


def told_by(context: OperationContext) -> Told:
    """Signs of life of an operation that waits."""
    return lambda what: context.progress(0.0, None, what)


class PlacedTraining:
    """`TrainingFace`, whose operations hold the trainer."""

    def __init__(self, face: TrainingFace, placing: Placing) -> None:
        self._face = face
        self._placing = placing
        for row in OPERATIONS.values():
            if row.face == "training":
                setattr(self, row.name, self._placed(row.name))

    def _placed(self, operation: str) -> Any:
        method = getattr(self._face, operation)

        async def run(request: Any, context: OperationContext) -> Any:
            async with self._placing.hold(TRAINING, told=told_by(context)):
                return await method(request, context)

        return run


class PlacedWeights:
    """`WeightPath`, whose deliveries hold what they need: a sync both halves, a push the
    sampler."""

    def __init__(self, path: WeightPath, pool: SamplerPool, placing: Placing) -> None:
        self._path = path
        self._pool = pool
        self._placing = placing

    async def sync(self, request: Sync, context: OperationContext) -> SyncReceipt:
        """As there."""
        async with self.delivering(request.in_flight, context):
            return await self._path.sync(request, context)

    @contextlib.asynccontextmanager
    async def delivering(
        self, in_flight: InFlight, context: OperationContext
    ) -> AsyncIterator[None]:
        """Within, weights can go from the trainer to the sampler."""
        told = told_by(context)
        if not self._pool.ready:
            # engines start with the devices to themselves
            async with self._placing.hold(SAMPLING, told=told):
                await self._pool.available(context)
        drained = in_flight == "wait"
        async with self._placing.hold(TRAINING, SAMPLING, told=told, drained=drained):
            yield

    async def push_part(self, request: PushPart, context: OperationContext) -> None:
        """As there: it stays in host memory."""
        await self._path.push_part(request, context)

    async def push(self, request: Push, context: OperationContext) -> SyncReceipt:
        """As there."""
        drained = request.in_flight == "wait"
        async with self._placing.hold(SAMPLING, told=told_by(context), drained=drained):
            return await self._path.push(request, context)
