"""Arctic backend: the vLLM engines as one sampler (imports sampler_worker, together and the
contract)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from remote_rl.errors import BackendError, RemoteRLError
from remote_rl.protocol import OperationContext
from remote_rl.requests import Generate, InFlight
from remote_rl.types import Generation, Label, Sample

from .cluster import Cluster
from .config import ArcticConfig
from .placing import Level
from .sampler_worker import SamplerWorker, is_death
from .sampling.settings import SampleRequest
from .together import together
from .weights.manifest import Form, Manifest
from .weights.sources import Source

log = logging.getLogger("remote_rl.arctic")

HEARTBEAT_SECONDS = 1.0
_WAIT_SECONDS = 5.0
#: of an engine that died; one that is killed again while it starts gets another try
_MOST_STARTS = 3


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
        self._closing = False
        self._starting: dict[SamplerWorker, asyncio.Task[None]] = {}
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
            await together(*(self._serve(group, take) for group in groups))
        except RemoteRLError:
            with contextlib.suppress(RemoteRLError):  # the first failure is the one to tell
                await self._everywhere("abort", [context.request_id])
            raise
        finally:
            aborting.cancel()
            beating.cancel()
        done.sort(key=lambda sample: (sample.prompt_index, sample.index))
        return Generation.from_samples(done)

    async def _serve(self, group: list[SampleRequest], take: Callable[[Sample], None]) -> None:
        left = {(each.prompt_index, each.index): each for each in group}
        while left:
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
        await self._everywhere("sleep")

    async def wake(self, level: Level) -> None:
        """Takes it again, the weights' only or, AWAKE, all of it."""
        self._level = level
        await self._everywhere("wake", level is Level.AWAKE)

    async def _everywhere(self, method: str, *arguments: Any) -> list[Any]:
        """Results of the engines that are there; one that dies in it is started again."""
        living = [each for each in self._workers if each.ready]
        answers = await _asked(living, method, *arguments)
        for answer in answers:
            if isinstance(answer, BaseException) and not is_death(answer):
                raise answer
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    # -- weights --------------------------------------------------------------------------------

    async def available(self, context: OperationContext) -> None:
        """Returns once an engine can take weights. Those that are gone are started again, and
        waited for where there is no other. Raises `BackendError` where none can be started."""
        self._start_missing()
        while not self.ready:
            starting = list(self._starting.values())
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
    ) -> list[str]:
        """Delivers the tensors of a source to all engines; the fingerprint of what each of them
        then holds. Where one fails half-way none serves until the next delivery; one that dies is
        started again, and the others have been served."""
        living = {each: each.process for each in self._workers if each.ready}
        # generates that it waits for may take longer than a silent operation is trusted
        beating = asyncio.ensure_future(
            self._beat(context, "delivering weights", lambda: (0, len(living)))
        )
        try:
            given = (manifest, source, in_flight, version, label)
            answers = await _asked(living, "update", *given)
        finally:
            beating.cancel()
        failures = [each for each in answers if isinstance(each, BaseException)]
        failures.sort(key=is_death)
        taken = [each for each in answers if not isinstance(each, BaseException)]
        if failures and not (taken and is_death(failures[0])):
            await self._after_failure()
            raise failures[0]
        if not taken:
            raise BackendError("every sampling engine has died; sync again, which waits for one")
        for worker, process in living.items():
            # one that died meanwhile may be there again, without these weights
            worker.synced = worker.ready and worker.process == process
        self._version, self._label = version, label
        return [str(each) for each in taken]

    async def _after_failure(self) -> None:
        """Engines that refused before a byte had moved serve what they did; all or none."""
        living = [each for each in self._workers if each.synced]
        states = await _asked(living, "serving")
        same = all(state == (self._version, self._label) or is_death(state) for state in states)
        for worker in living:
            worker.synced = worker.synced and same

    # -- death ----------------------------------------------------------------------------------

    def _died(self) -> None:
        """Starts again what has died."""
        self._heard()
        if self._started:
            self._start_missing()

    def _start_missing(self) -> None:
        for worker in self._workers:
            if not (worker.ready or worker in self._starting or self._closing):
                log.error("%s", worker.failure or f"{worker.name} is started again")
                self._starting[worker] = asyncio.create_task(
                    self._revive(worker), name=f"start of {worker.name}"
                )

    async def _revive(self, worker: SamplerWorker) -> None:
        try:
            for _ in range(_MOST_STARTS):
                if await self._started_again(worker):
                    log.info(
                        "%s is there again; it serves after the next weights.sync", worker.name
                    )
                    return
        finally:
            del self._starting[worker]

    async def _started_again(self, worker: SamplerWorker) -> bool:
        patience = self._config.placement.start_timeout
        try:
            async with asyncio.timeout(patience):
                await self._start(worker, None)
        except (RemoteRLError, TimeoutError) as error:
            why = f"not within {patience:g} s" if isinstance(error, TimeoutError) else str(error)
            worker.failure = BackendError(
                f"{worker.name} could not be started again ({why}); weights.sync tries it anew",
                worker=worker.name,
                traceback=str(getattr(error, "details", {}).get("traceback", "")),
            )
            log.error("%s", worker.failure)
            worker.end()
            return False
        return True

    async def close(self) -> None:
        """Ends all engines."""
        self._closing = True
        for task in self._starting.values():
            task.cancel()
        for worker in self._workers:
            worker.end()


async def _asked(workers: Iterable[SamplerWorker], method: str, *arguments: Any) -> list[Any]:
    """What each answers, or the error that it raised."""
    asking = [each.ask(method, *arguments) for each in workers]
    return await asyncio.gather(*asking, return_exceptions=True)
