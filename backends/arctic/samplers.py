"""Arctic backend: the vLLM engines as one sampler (imports sampler_worker, reviving, together and
the contract)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from remote_rl.errors import BackendError, RemoteRLError
from remote_rl.protocol import OperationContext
from remote_rl.requests import Generate, InFlight
from remote_rl.types import Generation, Label, Sample

from .asking import asked, is_death, most_telling, serve_on
from .cluster import Cluster
from .config import ArcticConfig
from .placing import Level
from .reviving import Revival
from .sampler_worker import SamplerWorker
from .sampling.flight import undrawn
from .sampling.settings import SampleRequest
from .together import together
from .weights.manifest import Form, Manifest
from .weights.sources import Broadcast, Source

log = logging.getLogger("remote_rl.arctic")

HEARTBEAT_SECONDS = 1.0
_WAIT_SECONDS = 5.0
_ABORT_SECONDS = 5.0


class SamplerPool:
    """All engines. Requests of one prompt go to the engine that has least to do; one that dies is
    started again, and serves once weights were delivered to it.

    heard: called when the workers' processes, or whether any of them serves, may have changed.
    """

    def __init__(self, config: ArcticConfig, cluster: Cluster, heard: Callable[[], None]) -> None:
        self._config = config
        self._heard = heard
        self._workers = [
            SamplerWorker(number, config, cluster, self._died)
            for number in range(config.sampling.engines)
        ]
        self._version: int | None = None
        self._label: Label = None
        self._paused = False
        self._level = Level.AWAKE
        self._started = False
        #: no move of an engine's memory takes longer than a start may
        self._patience = config.placement.start_timeout
        self._revival = Revival(lambda worker: self._start(worker, None), self._patience)
        #: shape and dtype of every tensor that the engines expect, by name
        self.forms: Mapping[str, Form] = {}

    @property
    def serves(self) -> bool:
        """Whether some engine has known weights."""
        return any(each.synced for each in self._workers)

    @property
    def ready(self) -> bool:
        """Whether some engine can take weights."""
        return any(each.ready for each in self._workers)

    @property
    def living(self) -> tuple[SamplerWorker, ...]:
        """The engines that can take weights."""
        return tuple(each for each in self._workers if each.ready)

    @property
    def processes(self) -> tuple[Any, ...]:
        """Of all workers that live."""
        return tuple(each.process for each in self._workers if each.process is not None)

    async def start(self, version: int | None) -> None:
        """All engines, with the base weights as `version`; None: they serve nothing yet."""
        await together(*(self._start(worker, version) for worker in self._workers))
        self._version = version
        self._started = True

    async def _start(self, worker: SamplerWorker, version: int | None) -> None:
        self.forms = await worker.start(version, self._heard)
        if self._paused:
            await worker.ask("pause")
        if self._level is not Level.AWAKE:
            await worker.ask("sleep")
        if self._level is Level.WEIGHTS:
            await worker.ask("wake", False)

    async def offers_stop_strings(self) -> bool:
        """Whether engines find stop strings in what this model writes."""
        return all(await self._everywhere("offers_stop_strings"))

    # -- generating -----------------------------------------------------------------------------

    async def generate(self, request: Generate, context: OperationContext) -> Generation:
        """All samples of a request; each is told as it ends."""
        params, done = request.params, list[Sample]()
        total = len(request.prompts) * params.n

        def take(sample: Sample) -> None:
            done.append(sample)
            context.emit(sample)
            context.progress(len(done), total, "generating")

        groups = [
            [
                SampleRequest(
                    request_id=context.request_id,
                    tokens=request.prompts[prompt],
                    params=params,
                    seed=context.seed,
                    prompt_index=prompt,
                    index=index,
                )
                for index in range(params.n)
            ]
            for prompt in range(len(request.prompts))
        ]
        aborting = asyncio.ensure_future(self._pass_abort(context))
        beating = asyncio.ensure_future(
            self._beat(context, "generating", lambda: (len(done), total))
        )
        try:
            await together(*(self._serve(group, take, context) for group in groups))
        except (RemoteRLError, asyncio.CancelledError):
            # an engine knows nothing of it, and would draw on; what hangs is not waited for
            ending = asyncio.ensure_future(self._abort(context))
            await asyncio.wait({ending}, timeout=_ABORT_SECONDS)
            raise
        finally:
            aborting.cancel()
            beating.cancel()
        done.sort(key=lambda sample: (sample.prompt_index, sample.index))
        return Generation.from_samples(done)

    async def _serve(
        self,
        group: list[SampleRequest],
        take: Callable[[Sample], None],
        context: OperationContext,
    ) -> None:
        left = {(each.prompt_index, each.index): each for each in group}
        while left:
            if context.cancelled and self._version is not None:
                for each in left.values():
                    take(undrawn(each, (self._version, self._label)))
                return
            worker = self._least_busy()
            count = len(left)
            worker.flying += count
            try:
                async for sample in worker.draw(list(left.values())):
                    del left[sample.prompt_index, sample.index]
                    take(sample)
            except BackendError as error:
                # seeds make what another engine draws as good as what this one would have
                if not is_death(error):
                    raise
            finally:
                worker.flying -= count

    def _least_busy(self) -> SamplerWorker:
        serving = [each for each in self._workers if each.synced]
        if serving:
            return min(serving, key=lambda each: each.flying)
        failures = [each.failure for each in self._workers if each.failure and not each.ready]
        if failures:
            raise BackendError(
                f"no sampling engine has known weights, since {failures[0].details['worker']} has "
                "died and is started again; call weights.sync, which waits for it, to go on",
                **failures[0].details,
            )
        raise BackendError(
            "no sampling engine has known weights, since none were delivered yet, or the last "
            "delivery failed half-way; call weights.sync to go on",
            worker="sampler",
        )

    async def _pass_abort(self, context: OperationContext) -> None:
        await context.abort_signal.wait()
        await self._abort(context)

    async def _abort(self, context: OperationContext) -> None:
        with contextlib.suppress(RemoteRLError):  # the generate itself tells
            await self._everywhere("abort", [context.request_id])

    async def _beat(
        self, context: OperationContext, what: str, state: Callable[[], tuple[int, int]]
    ) -> None:
        """Tells of tokens that were drawn, a sign of life for long samples and who waits for them.
        What hangs draws none."""
        before: list[Any] = []
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            with contextlib.suppress(RemoteRLError):  # the operation itself tells
                now = await self._everywhere("pulse")
                if now != before:
                    context.progress(*state(), what)
                before = now

    # -- control --------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Holds every generate at its next token."""
        self._paused = True
        await self._everywhere("pause")

    async def resume(self) -> None:
        """Lets them go on."""
        self._paused = False
        await self._everywhere("resume")

    async def reset_prefix_cache(self) -> None:
        """Forgets cached prompts."""
        await self._everywhere("reset_prefix_cache")

    async def sleep(self) -> None:
        """Gives GPU memory back; generates are held. An engine that can't is started again."""
        self._level = Level.ASLEEP
        await self._everywhere("sleep", within=self._patience)

    async def wake(self, level: Level) -> None:
        """Takes it again, the weights' only or, AWAKE, all of it."""
        self._level = level
        await self._everywhere("wake", level is Level.AWAKE, within=self._patience)

    async def _everywhere(
        self, method: str, *arguments: Any, within: float | None = None
    ) -> list[Any]:
        """Results of the engines that are there; one that dies in it, or takes longer than `within`
        seconds, is started again."""
        answers = await asked(self.living, method, *arguments, within=within)
        for answer in answers:
            if isinstance(answer, BaseException) and not is_death(answer):
                raise answer
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    # -- weights --------------------------------------------------------------------------------

    async def available(self, context: OperationContext) -> None:
        """Returns once an engine can take weights. Those that are gone are started again, and
        waited for where there is no other. Raises `BackendError` where none can be started."""
        self._revival.of(self._workers)
        while not self.ready:
            starting = self._revival.running
            if not starting:
                raise next(each.failure for each in self._workers if each.failure).copy()
            context.progress(0, 1, "starting a sampling engine again")
            await asyncio.wait(starting, timeout=_WAIT_SECONDS, return_when=asyncio.FIRST_COMPLETED)

    async def update(
        self,
        manifest: Manifest,
        source: Source,
        in_flight: InFlight,
        version: int,
        label: Label,
        context: OperationContext,
        among: Collection[Any] | None = None,
        failed: Callable[[], None] = lambda: None,
    ) -> list[str]:
        """Delivers the tensors of a source to all engines, or those whose processes are `among`
        these; the fingerprint of what each of them then holds. Where one fails half-way none serves
        until the next delivery; one that dies is started again, and the others have been served.
        failed: called as soon as one does."""
        living = {
            each: each.process for each in self.living if among is None or each.process in among
        }
        # generates that it waits for may take longer than a silent operation is trusted
        beating = asyncio.ensure_future(
            self._beat(context, "delivering weights", lambda: (0, len(living)))
        )
        try:
            given = (manifest, source, in_flight, version, label)
            answers = await asked(living, "update", *given, failed=failed)
        finally:
            beating.cancel()
        failures = [each for each in answers if isinstance(each, BaseException)]
        failures.sort(key=is_death)
        taken = [each for each in answers if not isinstance(each, BaseException)]
        if failures and not (taken and is_death(failures[0])):
            await serve_on(self._workers, (self._version, self._label))
            raise most_telling(failures) if isinstance(source, Broadcast) else failures[0]
        if not taken:
            raise BackendError("every sampling engine has died; sync again, which waits for one")
        for worker, process in living.items():
            # one that died meanwhile may be there again, without these weights
            worker.synced = worker.ready and worker.process == process
        self._version, self._label = version, label
        return [str(each) for each in taken]

    # -- death ----------------------------------------------------------------------------------

    def _died(self) -> None:
        """Starts again what has died."""
        self._heard()
        if self._started:
            self._revival.of(self._workers)

    async def close(self) -> None:
        """Ends all engines."""
        self._revival.close()
        for worker in self._workers:
            worker.end()
