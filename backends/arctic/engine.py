"""Arctic backend: the engine in its own process, trainer and sampler together (imports cluster,
halves, trainers, samplers, weight_path, training_face and the contract)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from remote_rl.errors import BackendError
from remote_rl.protocol import OperationContext
from remote_rl.requests import (
    FinishSession,
    Generate,
    Pause,
    Reset,
    ResetPrefixCache,
    Resume,
    Sleep,
    Wake,
)
from remote_rl.types import Generation

from .broadcasting import Broadcasts
from .child import Started
from .cluster import Cluster
from .config import ArcticConfig
from .engine_factory import way_of
from .halves import PlacedTraining, PlacedWeights, TrainingHalf, placing_of, told_by
from .placing import TRAINING, Placing, Sleeper
from .samplers import SamplerPool
from .together import together
from .trainers import TrainerGroup
from .training_face import TrainingFace
from .weight_path import WeightPath
from .weights.segment import sweep_dead

if TYPE_CHECKING:
    from .host import Reports

_HEARTBEAT_SECONDS = 5.0
_GRACE_SECONDS = 10.0


class Engine:
    """What `host` serves: the faces of `protocol.Backend`, on Ray workers."""

    def __init__(
        self,
        config: ArcticConfig,
        sampler_version: int | None,
        directory: Path,
        reports: Reports,
        place: Callable[[ArcticConfig, Sleeper, Sleeper], Placing] = placing_of,
    ) -> None:
        self._config = config
        self._sampler_version = sampler_version
        self._reports = reports
        self._cluster = Cluster(config, directory)
        self._trainers = TrainerGroup(config, self._cluster)
        self._pool = SamplerPool(config, self._cluster, self._tell_workers)
        self._path = WeightPath(self._trainers, self._pool, reports, self._way())
        self._training = TrainingFace(config, self._trainers, self._start_trainers_again)
        training = TrainingHalf(self._trainers, config.placement.start_timeout)
        self._placing = place(config, training, self._pool)
        self.weights = PlacedWeights(self._path, self._pool, self._placing)
        self.training = PlacedTraining(self._training, self._placing)
        self.sampling = SamplingFace(self._pool, self._placing)

    def _way(self) -> Literal["shared_memory", "cuda_ipc"] | Broadcasts:
        way, config = way_of(self._config), self._config
        if way == "shared_memory" or way == "cuda_ipc":
            return way
        workers, patience = config.sampling.tensor_parallel, config.weights.patience
        return Broadcasts(self._trainers, self._pool, way, workers, patience)

    async def start(self, request: None, context: OperationContext) -> Started:
        """Cluster, then ranks and engines side by side (one after the other where they share
        GPUs, since each measures what is free, with ranks that make room where they are to). What
        they compute on, and what they can't do with this model."""
        patience = self._config.placement.start_timeout
        sweep_dead()
        async with _stage(0, "starting Ray", patience, context):
            await context.thread(self._cluster.join)
        self._cluster.watch(self._reports.lost)
        # it ends by itself, with a reason that is worth more than that it took too long
        async with _stage(0, "taking places in Ray", patience + _GRACE_SECONDS, context):
            await context.thread(self._cluster.reserve)
        ranks, engines = self._config.training.ranks, self._config.sampling.engines
        loading = f"loading the model in {ranks} ranks and {engines} vLLM engines"
        async with _stage(1, loading, patience, context):
            if self._config.placement.colocated or self._placing.exclusive:
                await self._start_trainers(context)
                if self._placing.exclusive:
                    await self._placing.sleep(TRAINING)
                await self._pool.start(self._sampler_version)
            else:
                await together(
                    self._start_trainers(context), self._pool.start(self._sampler_version)
                )
        self._training.begin(context.version)
        self._reports.serving(self._sampler_version, None)
        context.progress(3, 3, "ready")
        stops = await self._pool.offers_stop_strings()
        withheld = frozenset[str]() if stops else frozenset({"stop"})
        return Started(devices=self._trainers.devices, withheld=withheld)

    async def _start_trainers(self, context: OperationContext) -> None:
        await self._trainers.start(context, self._tell_workers)
        self._placing.renewed(TRAINING)

    async def _start_trainers_again(self, context: OperationContext) -> None:
        patience = self._config.placement.start_timeout
        async with _stage(1, "starting the training ranks again", patience, context):
            await self._start_trainers(context)

    def _tell_workers(self) -> None:
        self._reports.workers((*self._trainers.processes, *self._pool.processes))
        if not self._pool.serves:
            self._reports.serving(None, None)

    async def reset(self, request: Reset, context: OperationContext) -> None:
        """Base weights on both halves, as `context.next_version`."""
        async with self._placing.hold(TRAINING, told=told_by(context)):
            await self._training.reset(context)
        async with self.weights.delivering("keep", context):
            await self._path.deliver("keep", context.next_version, None, context)

    async def sleep(self, request: Sleep, context: OperationContext) -> None:
        """A half gives its GPU memory back until an operation needs it; a CPU has none to give."""
        await self._placing.sleep(request.half)

    async def wake(self, request: Wake, context: OperationContext) -> None:
        """Takes it again."""
        await self._placing.wake(request.half, told_by(context))

    async def close(self) -> None:
        """Ends all workers, and the cluster where it is our own."""
        self._path.staging.drop()
        await self._pool.close()
        self._trainers.end()
        await self._cluster.close()


class SamplingFace:
    """Implements `protocol.Sampling`."""

    def __init__(self, pool: SamplerPool, placing: Placing) -> None:
        self._pool = pool
        self._placing = placing

    async def generate(self, request: Generate, context: OperationContext) -> Generation:
        """All samples of a request."""
        return await self._placing.draw(
            lambda: self._pool.generate(request, context), told_by(context), context.abort_signal
        )

    async def pause(self, request: Pause, context: OperationContext) -> None:
        """Holds every generate at its next token."""
        await self._pool.pause()
        self._placing.pause(True)

    async def resume(self, request: Resume, context: OperationContext) -> None:
        """Lets them go on."""
        await self._pool.resume()
        self._placing.pause(False)

    async def reset_prefix_cache(
        self, request: ResetPrefixCache, context: OperationContext
    ) -> None:
        """Forgets the KV of cached prompts."""
        await self._pool.reset_prefix_cache()

    async def finish_session(self, request: FinishSession, context: OperationContext) -> None:
        """Engines keep nothing for a session but what their prefix cache drops by itself."""


@contextlib.asynccontextmanager
async def _stage(
    number: int, what: str, patience: float, context: OperationContext
) -> AsyncIterator[None]:
    """Signs of life while something starts that takes minutes without one; for so long only."""

    async def beat() -> None:
        while True:
            context.progress(number, 3, what)
            await asyncio.sleep(_HEARTBEAT_SECONDS)

    beating = asyncio.ensure_future(beat())
    try:
        async with asyncio.timeout(patience):
            yield
    except TimeoutError as error:
        raise BackendError(
            f"{what} was not done within {patience:g} s, what placement.start_timeout allows",
            worker="engine",
        ) from error
    finally:
        beating.cancel()
