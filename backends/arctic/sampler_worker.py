"""Arctic backend: one vLLM engine, in its Ray worker and as the pool sees it (imports ray, asking,
cluster, sampling.settings and the contract; sampling.engine in the worker)."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, cast

import ray
from ray.exceptions import RayError

from remote_rl.errors import (
    REFUSALS,
    BackendError,
    RemoteRLError,
    as_remote_error,
)
from remote_rl.types import Sample

from .asking import is_death
from .cluster import Cluster, begin_worker
from .config import ArcticConfig
from .engine_factory import on_cpu
from .leftovers import Owner, end_processes
from .model_directory import model_info
from .sampling.settings import SampleRequest, SamplerSettings
from .weights.manifest import Form
from .worker_errors import worker_error

log = logging.getLogger("remote_rl.arctic")

_MOST_CALLS = 100_000
_BEGUN_AGAIN = "it is started again, and serves after the next weights.sync"
_LIVES = "it lives: do as that says, or look at the traceback in the error's details"


class SamplerActor:
    """Hosts one vLLM engine in a Ray worker."""

    def __init__(self, variables: dict[str, str]) -> None:
        self._process = begin_worker(variables)
        self._engine: Any = None

    async def process(self) -> Owner:
        """The worker's process."""
        return self._process

    async def life(self) -> None:
        """Lasts as long as the worker, so that whoever waits hears of its death."""
        await asyncio.Event().wait()

    async def begin(self, config: ArcticConfig, version: int | None) -> Any:
        """Loads the model; what tensors it expects, or the error that it raised."""
        try:
            settings = sampler_settings(config, version)
            os.environ.update(settings.environment())
            from .sampling.engine import SamplerEngine

            self._engine = SamplerEngine()
            await self._engine.start(settings)
            return self._engine.manifest()
        except Exception as error:  # noqa: BLE001 - as a value, since Ray would wrap it
            return as_remote_error(error)

    async def generate(self, requests: Sequence[SampleRequest]) -> AsyncIterator[Any]:
        """Samples as they end; an error instead, last, where one comes."""
        try:
            async for sample in self._engine.generate(requests):
                yield sample
        except Exception as error:  # noqa: BLE001 - as above
            yield as_remote_error(error)

    async def run(self, method: str, *arguments: Any) -> Any:
        """One method of the engine: its result, or the error that it raised."""
        try:
            result = getattr(self._engine, method)(*arguments)
            return await result if inspect.isawaitable(result) else result
        except Exception as error:  # noqa: BLE001 - as above
            return as_remote_error(error)


class SamplerWorker:
    """One engine as the pool sees it, through all its lives.

    ready: it answers. synced: it has the weights that the pool serves. flying: samples that it is
    to draw. updating: it was told to take weights, and has not answered. failure: why it isn't
    there, or the last time wasn't. died: called when it dies.
    """

    def __init__(
        self, number: int, config: ArcticConfig, cluster: Cluster, died: Callable[[], None]
    ) -> None:
        self.name = f"sampling engine {number}"
        self._number = number
        self.process: Owner | None = None
        self.ready = False
        self.synced = False
        self.updating = False
        self.flying = 0
        self.failure: BackendError | None = None
        self._config = config
        self._cluster = cluster
        self._died = died
        self._actor: Any = None
        self._watch: asyncio.Task[None] | None = None
        self._given_up: tuple[Any, BackendError] | None = None

    async def start(self, version: int | None, heard: Callable[[], None]) -> Mapping[str, Form]:
        """The tensors that it expects. version: of the base weights, None serves nothing yet.
        heard: called once its process is known. Raises what it refuses, and `BackendError`."""
        sampling = self._config.sampling
        options = self._cluster.engine_options(self._number)
        remote = ray.remote(SamplerActor).options(max_concurrency=_MOST_CALLS, **options)
        actor = self._actor = remote.remote(self._cluster.environment(sampling.threads))
        try:
            self.process = await actor.process.remote()
            heard()
            forms = await actor.begin.remote(self._config, version)
        except RayError as error:
            raise self._start_failure(type(error).__name__, str(error)) from None
        if isinstance(forms, REFUSALS):
            raise forms
        if isinstance(forms, RemoteRLError):
            raise self._start_failure(str(forms), str(forms.details.get("traceback", "")))
        self.ready = True
        self.synced = version is not None
        self._watch = asyncio.create_task(self._follow(actor), name=f"{self.name}'s life")
        return cast("Mapping[str, Form]", forms)

    def _start_failure(self, why: str, traceback: str) -> BackendError:
        words = self._cluster.last_words(self.process)
        return BackendError(
            f"{self.name} did not start ({why})", worker=self.name, traceback=f"{traceback}{words}"
        )

    async def draw(self, requests: Sequence[SampleRequest]) -> AsyncIterator[Sample]:
        """Each sample as it ends. Raises what the engine raises; `is_death` tells of its death."""
        actor = self._actor
        try:
            stream = actor.generate.options(num_returns="streaming").remote(list(requests))
            async for reference in stream:
                sample = await reference
                if isinstance(sample, RemoteRLError):
                    raise self._told(actor, "generate", sample)
                yield sample
        except RayError as error:
            raise self._lost(actor, "generate", error) from None

    async def ask(self, method: str, *arguments: Any) -> Any:
        """One method of the engine. Raises as `draw` does, also where it has died since whoever
        asks has chosen it."""
        if not self.ready:
            raise self._gone()
        actor = self._actor
        updates = method == "update"
        self.updating = self.updating or updates
        try:
            answer = await actor.run.remote(method, *arguments)
        except RayError as error:
            raise self._lost(actor, method, error) from None
        finally:
            self.updating = self.updating and not updates
        if isinstance(answer, RemoteRLError):
            raise self._told(actor, method, answer)
        return answer

    def _gone(self) -> BackendError:
        """Of one that isn't there, or only starts."""
        if self.failure is not None and is_death(self.failure):
            return self.failure.copy()
        return BackendError(f"{self.name} is gone; {_BEGUN_AGAIN}", worker=self.name, died=True)

    async def _follow(self, actor: Any) -> None:
        try:
            await actor.life.remote()
        except RayError as error:
            self._lost(actor, "", error)

    def _told(self, actor: Any, method: str, error: RemoteRLError) -> RemoteRLError:
        """What an engine raised. vLLM can fail in a process that lives on; it is of no use then."""
        if error.details.get("failed"):
            return self._lost(actor, method, error)
        if not isinstance(error, BackendError):
            return error
        details = {"traceback": "", **error.details, "worker": self.name}
        told = worker_error(why=error, method=method, then=_LIVES, **details)
        told.__cause__ = error.__cause__
        return told

    def _lost(self, actor: Any, method: str, error: Exception) -> BackendError:
        """It has died, as somebody notices; the first one who does has it started again."""
        if self._given_up is not None and self._given_up[0] is actor:
            return self._given_up[1].copy()
        traceback = getattr(error, "details", {}).get("traceback") or str(error)
        failure = worker_error(
            self.name,
            type(error) if isinstance(error, RayError) else error,
            method,
            _BEGUN_AGAIN,
            f"{traceback}{self._cluster.last_words(self.process)}",
            died=True,
        )
        self._bury(actor, failure)
        return failure.copy()

    def give_up(self, why: str) -> None:
        """Ends one that hangs: what it was asked fails with this, and it is started again. Nothing
        to do where it has died, and perhaps starts, already."""
        if not self.ready:
            return
        failure = BackendError(
            f"{self.name} {why}; it was ended, and {_BEGUN_AGAIN}",
            worker=self.name,
            died=True,
        )
        self._given_up = (self._actor, failure)
        self._bury(self._actor, failure)

    def _bury(self, actor: Any, failure: BackendError) -> None:
        if self._actor is actor:
            self.failure = failure
            self.end()
            self._died()

    def end(self) -> None:
        """Kills it."""
        if self._watch is not None and self._watch is not asyncio.current_task():
            self._watch.cancel()
        if self._actor is not None:
            with contextlib.suppress(RayError):  # it can be gone
                ray.kill(self._actor)
        if self.process is not None:
            end_processes([self.process])
        self._actor = self._watch = self.process = None
        self.ready = self.synced = False


def sampler_settings(config: ArcticConfig, version: int | None) -> SamplerSettings:
    """What one engine is started with. version: of the base weights, None serves nothing yet."""
    sampling = config.sampling
    longest = model_info(config.model).context_length
    assert longest is not None, "model_info refuses a model without one"
    return SamplerSettings(
        model=config.model.path,
        dtype=sampling.dtype or config.model.dtype,
        context_length=longest,
        device="cpu" if on_cpu(config) else "cuda",
        version=version,
        sequences=sampling.sequences,
        batched_tokens=sampling.batched_tokens,
        cache_bytes=sampling.cache_gib << 30 if on_cpu(config) else None,
        memory_fraction=sampling.memory_fraction,
        tensor_parallel=sampling.tensor_parallel,
        eager=on_cpu(config) if sampling.eager is None else sampling.eager,
        prefix_caching=sampling.prefix_caching,
        trust_remote_code=config.model.trust_remote_code,
    )
