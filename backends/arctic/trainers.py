"""Arctic backend: the training ranks as one worker (imports ray, cluster, plan and the contract;
training.rank in the ranks)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import ray
from ray.exceptions import RayError

from remote_rl.errors import REFUSALS, BackendError, RemoteRLError, describe
from remote_rl.protocol import OperationContext
from remote_rl.types import Devices

from .cluster import Cluster, begin_worker, free_port
from .config import ArcticConfig
from .devices import devices_of
from .engine_factory import on_cpu
from .leftovers import Owner, end_processes
from .training.answers import RankFacts, RankSettings
from .weights.manifest import Form

log = logging.getLogger("remote_rl.arctic")

PULSE_SECONDS = 1.0
#: how long the other ranks may take to answer once one has refused or failed
_GRACE_SECONDS = 5.0


@attrs.frozen(eq=False)
class Outcome:
    """Of one method in one rank: its value, or the error with its traceback, and the seconds that
    it took."""

    value: Any = None
    seconds: float = 0.0
    error: RemoteRLError | None = None
    trace: str = ""


class RankActor:
    """Hosts one rank in a Ray worker."""

    def __init__(self, rank: int, world: int, variables: dict[str, str]) -> None:
        self._place = (rank, world)
        self._process = begin_worker(variables)
        self._rank: Any = None

    def address(self) -> tuple[str, int, Owner]:
        """Host and a free port for the ranks to meet at, and the process."""
        return ray.util.get_node_ip_address(), free_port(), self._process

    def begin(self, config: ArcticConfig, host: str, port: int) -> Outcome:
        """Loads the model and meets the other ranks."""

        rank, world = self._place
        os.environ.update(
            MASTER_ADDR=host,
            MASTER_PORT=str(port),
            RANK=str(rank),
            WORLD_SIZE=str(world),
            LOCAL_RANK="0",  # a worker sees its own devices only
        )

        def make() -> Any:
            from .training.rank import Rank

            training, model = config.training, config.model
            settings = RankSettings(
                path=model.path,
                dtype=model.dtype,
                zero_stage=training.zero_stage,
                device="cpu" if on_cpu(config) else "cuda",
                head_chunk=training.head_chunk,
                gradient_checkpointing=training.gradient_checkpointing,
                trust_remote_code=model.trust_remote_code,
                lora=training.lora,
                seed=config.seed,
            )
            self._rank = Rank(settings, rank, world)
            return self._rank.start()

        return _outcome(make)

    def run(self, method: str, arguments: tuple[Any, ...]) -> Outcome:
        """One method of the rank."""

        def work() -> Any:
            result = getattr(self._rank, method)(*arguments)
            self._rank.settle()
            return result

        return _outcome(work)

    @ray.method(concurrency_group="watch")
    def here(self) -> None:
        """Answers, also while the rank works."""

    @ray.method(concurrency_group="watch")
    def pulse(self) -> int:
        """Rises with each piece of work that the rank does."""
        return 0 if self._rank is None else int(self._rank.pulse)


def _outcome(function: Callable[[], Any]) -> Outcome:
    begin = time.perf_counter()
    try:
        return Outcome(value=function(), seconds=time.perf_counter() - begin)
    except BaseException as error:  # noqa: BLE001 - MemoryError and all: the caller hears it
        known = error if isinstance(error, RemoteRLError) else BackendError(describe(error))
        return Outcome(error=known, trace=traceback.format_exc())


class TrainerGroup:
    """All ranks. Every method runs in all of them at once, since they meet in collectives; one
    that fails or dies takes the others along."""

    def __init__(self, config: ArcticConfig, cluster: Cluster) -> None:
        self._config = config
        self._cluster = cluster
        self._actors: list[Any] = []
        self._facts: list[RankFacts] = []
        self.processes: tuple[Owner, ...] = ()
        #: why the ranks are gone, None while they live
        self.failure: BackendError | None = None

    @property
    def size(self) -> int:
        """How many ranks."""
        return self._config.training.ranks

    @property
    def forms(self) -> Mapping[str, Form]:
        """What the ranks publish, in their own dtypes."""
        return self.facts.forms

    @property
    def facts(self) -> RankFacts:
        """What the first rank has found; the others differ in the device alone."""
        return self._facts[0]

    @property
    def devices(self) -> Devices:
        """What the run computes on."""
        return devices_of(self._config, [each.device for each in self._facts])

    async def start(self, context: OperationContext, heard: Callable[[], None]) -> None:
        """Starts the ranks. heard: called once their processes are known."""
        training = self._config.training
        remote = ray.remote(concurrency_groups={"watch": 1})(RankActor)
        variables = self._cluster.environment(training.threads)
        self._actors = [
            remote.options(**self._cluster.actor_options(rank)).remote(rank, self.size, variables)
            for rank in range(self.size)
        ]
        self.failure = None
        try:
            places = await self._gather("start", [actor.address.remote() for actor in self._actors])
            self.processes = tuple(process for _, _, process in places)
            heard()
            host, port, _ = places[0]
            references = [actor.begin.remote(self._config, host, port) for actor in self._actors]
            outcomes = await self._outcomes("start", references, context)
            self._facts = [outcome.value for outcome in outcomes]
        except BaseException as error:
            self.failure = self.failure or BackendError(
                f"the training ranks did not start ({describe(error)}); load a checkpoint, or "
                "reset, to try again",
                worker="ranks",
            )
            self.end()
            raise

    async def alive(self) -> bool:
        """Whether all ranks are there; where one is not, `failure` says so from now on."""
        if self.failure is None:
            with contextlib.suppress(BackendError):
                await self._gather("an idle moment", [each.here.remote() for each in self._actors])
        return self.failure is None

    async def call(
        self, method: str, arguments: Sequence[tuple[Any, ...]], context: OperationContext
    ) -> list[Any]:
        """`method` with each rank's own arguments; their results in order of rank.

        Raises a refusal that the ranks agree in, after which all is as before; else, after all of
        them were ended, `BackendError` with the rank that failed and its traceback."""
        values, _ = await self.measured(method, arguments, context)
        return values

    async def measured(
        self, method: str, arguments: Sequence[tuple[Any, ...]], context: OperationContext
    ) -> tuple[list[Any], float]:
        """As `call`, and the seconds that the slowest rank computed."""
        if self.failure is not None:
            raise self.failure.copy()
        references = [
            actor.run.remote(method, given) for actor, given in zip(self._actors, arguments)
        ]
        outcomes = await self._outcomes(method, references, context)
        values = [outcome.value for outcome in outcomes]
        return values, max(outcome.seconds for outcome in outcomes)

    async def everywhere(
        self, method: str, *arguments: Any, context: OperationContext
    ) -> list[Any]:
        """`method` with the same arguments in all ranks."""
        return await self.call(method, [arguments] * self.size, context)

    async def _outcomes(
        self, method: str, references: list[Any], context: OperationContext
    ) -> list[Outcome]:
        pulse = asyncio.ensure_future(self._pass_pulse(method, context))
        try:
            outcomes = await self._gather(method, references)
        finally:
            pulse.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await pulse
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        return outcomes

    async def _gather(self, method: str, references: list[Any]) -> list[Any]:
        """Results of all; where one has failed the others get a few seconds, then end."""
        waits = [asyncio.ensure_future(_awaited(reference)) for reference in references]
        ended: list[asyncio.Future[Any]] = []
        for wait in waits:
            wait.add_done_callback(ended.append)
        try:
            waiting = set(waits)
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if any(_failed(wait) for wait in done):
                    await asyncio.wait(waits, timeout=_GRACE_SECONDS)
                    break
            await self._judge(method, waits, [wait for wait in ended if _failed(wait)])
            return [wait.result() for wait in waits]
        finally:
            for wait in waits:
                wait.cancel()

    async def _judge(
        self,
        method: str,
        waits: Sequence[asyncio.Future[Any]],
        failed: Sequence[asyncio.Future[Any]],
    ) -> None:
        """Ends the ranks and raises, unless all have answered or refused alike. failed: in the
        order in which they did."""
        if not failed or (len(failed) == len(waits) and all(_refused(each) for each in failed)):
            return
        # a rank that has died is why others lose their connection to it; else the first one is
        first = next((each for each in failed if each.exception() is not None), failed[0])
        rank = waits.index(first)
        process = self.processes[rank] if rank < len(self.processes) else None
        words = await asyncio.get_running_loop().run_in_executor(
            None, self._cluster.last_words, process
        )
        self.failure = _failure(method, rank, first, words)
        log.error("%s", self.failure)
        self.end()
        raise self.failure.copy()

    async def _pass_pulse(self, method: str, context: OperationContext) -> None:
        before: list[int] = []
        while True:
            await asyncio.sleep(PULSE_SECONDS)
            try:
                now = await asyncio.gather(
                    *(_awaited(actor.pulse.remote()) for actor in self._actors)
                )
            except RayError:
                return  # the operation itself tells
            if now != before:
                context.progress(float(sum(now)), None, method.replace("_", " "))
            before = now

    def end(self) -> None:
        """Kills all ranks."""
        for actor in self._actors:
            with contextlib.suppress(RayError):  # it can be gone
                ray.kill(actor)
        # one that has stopped, or hangs, pays no heed to Ray
        end_processes(self.processes)
        self._actors = []
        self.processes = ()


async def _awaited(reference: Any) -> Any:
    return await reference


def _failed(wait: asyncio.Future[Any]) -> bool:
    if wait.exception() is not None:
        return True
    result = wait.result()
    return isinstance(result, Outcome) and result.error is not None


def _refused(wait: asyncio.Future[Any]) -> bool:
    return wait.exception() is None and isinstance(wait.result().error, REFUSALS)


def _failure(method: str, rank: int, wait: asyncio.Future[Any], words: str) -> BackendError:
    error = wait.exception()
    if error is not None:
        why, trace = f"died ({type(error).__name__})", f"{error}{words}"
    else:
        outcome = wait.result()
        why, trace = f"failed ({outcome.error})", outcome.trace
    return BackendError(
        f"rank {rank} {why} in {method}, and the other ranks were ended with it; load a "
        "checkpoint, or reset, to start them again",
        worker=f"rank {rank}",
        traceback=trace,
    )
