"""Arctic backend: the training ranks as one worker (imports ray, cluster, rank_worker and the
contract)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from remote_rl.errors import REFUSALS, BackendError, describe
from remote_rl.protocol import OperationContext
from remote_rl.types import Devices

from .cluster import Cluster
from .config import ArcticConfig
from .devices import devices_of
from .leftovers import Owner, end_processes
from .rank_worker import Outcome, RankActor
from .training.answers import RankFacts
from .weights.manifest import Form
from .worker_errors import worker_error

log = logging.getLogger("remote_rl.arctic")

PULSE_SECONDS = 1.0
#: how long the other ranks may take to answer once one has refused or failed
_GRACE_SECONDS = 5.0
#: what torch says of a port that is not free
_TAKEN = "EADDRINUSE"


class TrainerGroup:
    """All ranks. Every method runs in all of them at once, since they meet in collectives; one
    that fails or dies takes the others along."""

    def __init__(self, config: ArcticConfig, cluster: Cluster) -> None:
        self._config = config
        self._cluster = cluster
        self._actors: list[Any] = []
        self._facts: list[RankFacts] = []
        self.processes: tuple[Owner, ...] = ()
        #: the first rank's machine
        self.host = ""
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
        try:
            await self._start(context, heard)
        except BackendError as error:
            if _TAKEN not in str(error):
                raise
            # the port was free when it was chosen, and somebody else's when the ranks met
            log.warning("the training ranks are started again, with another port")
            await self._start(context, heard)

    async def _start(self, context: OperationContext, heard: Callable[[], None]) -> None:
        training = self._config.training
        remote = ray.remote(concurrency_groups={"watch": 1})(RankActor)
        variables = self._cluster.environment(training.threads)
        self._actors = [
            remote.options(**self._cluster.rank_options(rank)).remote(rank, self.size, variables)
            for rank in range(self.size)
        ]
        self.failure = None
        try:
            places = await self._gather("start", [actor.address.remote() for actor in self._actors])
            self.processes = tuple(process for _, _, process in places)
            heard()
            self.host, port, _ = places[0]
            begun = (self._config, self.host, port)
            references = [actor.begin.remote(*begun) for actor in self._actors]
            outcomes = await self._outcomes("start", references, context)
            self._facts = [outcome.value for outcome in outcomes]
        except BaseException as error:
            self.failure = self.failure or BackendError(
                f"the training ranks did not start ({describe(error)}); load a checkpoint, or "
                "reset, to try again",
                worker="ranks",
                traceback="".join(traceback.format_exception(error)),
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
        self.failure = self.failure or _failure(method, rank, first, words)
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

    def call_off(self, group: str) -> None:
        """Ends what rank 0 waits for in a group of a broadcast; not waited for, since a rank that
        hangs would not answer."""
        if self._actors:
            self._actors[0].call_off.remote(group)

    def give_up(self, why: str) -> None:
        """Kills ranks that hang; what they were asked fails with this."""
        if self.failure is not None:
            return  # they are gone already
        self.failure = BackendError(
            f"{why}, and they were ended; load a checkpoint, or reset, to start them again",
            worker="ranks",
        )
        log.error("%s", self.failure)
        self.end()

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
        why, trace = type(error), f"{error}{words}"
    else:
        outcome = wait.result()
        why, trace = outcome.error, outcome.trace
    then = "all ranks were ended: load a checkpoint, or reset, to start them again"
    return worker_error(f"rank {rank}", why, method, then, trace)
