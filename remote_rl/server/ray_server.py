"""Server: a run in a named Ray actor, from its start to its end (imports ray_actor, life,
transports' ray_cluster, errors).

    with RayServer("mock", name="run") as server:  # in a process of the cluster
        ...
    rl = connect("ray:run")                        # in any other
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..errors import ConflictError, InvalidRequestError, RunLostError, UnreachableError
from ..transports.ray_cluster import NAMESPACE, Place, in_short, joined
from .life import print_line, started, stop_signals
from .ray_actor import ServedRun
from .serve import Limits

log = logging.getLogger("remote_rl.server")

#: for the actor's process to begin; a busy machine takes a few
_PLACED_SECONDS = 60.0
#: after the grace of a stop, for the backend to close
_CLOSE_SECONDS = 30.0
#: calls that the actor works on at once: a wait of each client, and what it submits
_CONCURRENT = 1000
_LOOK_SECONDS = 0.5


def usual_options(ray: Any) -> dict[str, Any]:
    """How an actor for a run is made: on this node, without resources."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    return {
        "num_cpus": 0,
        "max_concurrency": _CONCURRENT,
        "enable_task_events": False,  # one a message, and each costs time
        "scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False),
    }


class RayRun:
    """A dispatcher in an actor of its own, as whoever started it sees it. The actor ends with this
    object's process.

    actor_options: for Ray, such as num_gpus or runtime_env. Without one it takes no resources and
    lies on this node, where a relative checkpoint_dir is meant.
    Raises `ConflictError` where the name is taken.
    """

    def __init__(
        self,
        backend_name: str,
        options: Mapping[str, Any],
        place: Place,
        *,
        address: str | None = None,
        checkpoint_dir: str | Path | None = None,
        limits: Limits | None = None,
        actor_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.place = place
        self.limits = limits or Limits()
        self._what = (backend_name, dict(options))
        # the actor's own working directory is one of Ray's
        self._folder = None if checkpoint_dir is None else Path(checkpoint_dir).resolve()
        self._ray = joined(address)
        taken = {"name", "namespace", "max_restarts", "get_if_exists"} & set(actor_options or {})
        if taken:
            raise InvalidRequestError(
                f"actor_options can't hold {sorted(taken)[0]!r}, which the run itself decides",
                field="actor_options",
            )
        try:
            self._actor = self._created(actor_options or {})
        except ValueError as error:
            if type(error).__name__ != "ActorAlreadyExistsError":
                raise InvalidRequestError(f"Ray refuses the actor: {error}") from error
            raise ConflictError(
                f"there is an actor at {place.target} already; end it, or choose another name"
            ) from error

    def _created(self, actor_options: Mapping[str, Any]) -> Any:
        usual = usual_options(self._ray)
        if actor_options:
            del usual["scheduling_strategy"]
        options = {**usual, **actor_options, "max_restarts": 0}
        options |= {"name": self.place.name, "namespace": self.place.namespace}
        actor_class = self._ray.remote(ServedRun).options(**options)
        return actor_class.remote(self.limits.max_body)

    async def start(self, hear: Callable[[str], None]) -> None:
        """Waits until the backend has started; `hear` is told what it is doing. Raises its error,
        or `UnreachableError` where the actor doesn't come to be."""
        await self._placed()
        start = self._call(
            "start",
            *self._what,
            checkpoint_dir=self._folder,
            lease_seconds=self.limits.lease,
            stall_timeout=self.limits.stall,
            budget_bytes=self.limits.budget,
        )
        while not start.done():
            await asyncio.wait((start,), timeout=_LOOK_SECONDS)
            if not start.done():
                hear(await self._heard("doing"))
        error = await self._heard(start)
        if error is not None:
            raise error

    async def _placed(self) -> None:
        try:
            async with asyncio.timeout(_PLACED_SECONDS):
                await self._heard("doing")
        except TimeoutError as error:
            await self.close()
            raise UnreachableError(
                f"the actor at {self.place.target} did not begin within {_PLACED_SECONDS:g} s; "
                "`ray status` says whether the cluster has what it asks for"
            ) from error

    async def over(self, stop: asyncio.Event) -> RunLostError | None:
        """Waits until `stop` is set or the run is lost, and ends it in order: what was lost."""
        limits = self.limits
        over = self._call("run_over", limits.grace, limits.lease)
        stopped = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait((over, stopped), return_when=asyncio.FIRST_COMPLETED)
            if over.done():
                return await self._lost(over)
            try:
                await self._heard("stop")
            except UnreachableError:
                pass  # it has died just now, or long ago, which `over` says as well
            async with asyncio.timeout(limits.grace + _CLOSE_SECONDS):
                return await self._lost(over)
        except TimeoutError:
            log.error("the backend at %s does not close; it is ended without", self.place.target)
            return None
        finally:
            stopped.cancel()
            over.cancel()

    async def close(self) -> None:
        """Ends the actor, whatever it does."""
        self.kill()

    def kill(self) -> None:
        """As `close`, from anywhere."""
        if self._ray.is_initialized():
            self._ray.kill(self._actor)

    async def _lost(self, over: asyncio.Future[Any]) -> RunLostError | None:
        try:
            lost: RunLostError | None = await self._heard(over)
            return lost
        except UnreachableError as error:
            return RunLostError(f"{error.message}, and the run with it")

    def _call(self, method: str, *arguments: Any, **named: Any) -> asyncio.Future[Any]:
        reference = getattr(self._actor, method).remote(*arguments, **named)
        return asyncio.wrap_future(reference.future())

    async def _heard(self, call: str | asyncio.Future[Any]) -> Any:
        """What a call answers; `UnreachableError` where the actor has died."""
        try:
            return await (self._call(call) if isinstance(call, str) else call)
        except self._ray.exceptions.RayActorError as error:
            raise UnreachableError(
                f"the actor at {self.place.target} has died: {in_short(error)}"
            ) from error


class RayServer:
    """Serves one run in an actor from the constructor to `stop`, for notebooks and tests;
    `remote-rl serve --ray-name` is a process that does so.

    name, namespace: of the actor. address: of the cluster, for a process that is in none.
    checkpoint_dir: on the actor's node. limits, actor_options: as for `RayRun`. options: the
    backend's own. target: what others `connect` to. The actor ends with this process.
    """

    def __init__(
        self,
        backend_name: str,
        *,
        name: str,
        namespace: str = NAMESPACE,
        address: str | None = None,
        checkpoint_dir: str | Path | None = None,
        limits: Limits | None = None,
        actor_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._run = RayRun(
            backend_name,
            options,
            Place(name, namespace),
            address=address,
            checkpoint_dir=checkpoint_dir,
            limits=limits,
            actor_options=actor_options,
        )
        self.target = self._run.place.target
        self._stopped = False
        try:
            _done(self._run.start(lambda what: log.info("starting %s: %s", name, what)))
        except BaseException:
            self._run.kill()
            raise

    def stop(self) -> None:
        """Ends the run in order; what runs may go on for `limits.grace`. A second call does
        nothing."""
        if self._stopped:
            return
        self._stopped = True

        async def end() -> None:
            stop = asyncio.Event()
            stop.set()
            lost = await self._run.over(stop)
            if lost is not None:
                log.warning("%s was lost before its stop: %s", self.target, lost)

        try:
            _done(end())
        finally:
            self._run.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def _done(coroutine: Coroutine[Any, Any, None]) -> None:
    """Runs it to its end in a thread: a notebook's own has a loop already."""
    thread = ThreadPoolExecutor(1, "remote_rl RayServer")
    try:
        thread.submit(asyncio.run, coroutine).result()
    finally:
        thread.shutdown(wait=False)


async def serve(
    backend_name: str,
    options: Mapping[str, Any],
    place: Place,
    *,
    address: str | None = None,
    checkpoint_dir: str | Path | None = None,
    limits: Limits | None = None,
    announce: Callable[[str], None] | None = None,
) -> None:
    """As `remote_rl.server.serve.serve`, in an actor: until SIGINT or SIGTERM. address: of the
    cluster; None is that of RAY_ADDRESS, or the one on this machine. A run that is lost, or whose
    actor died, is raised as `RunLostError`."""
    run = RayRun(
        backend_name,
        options,
        place,
        address=address,
        checkpoint_dir=checkpoint_dir,
        limits=limits,
    )
    with stop_signals() as stop, contextlib.ExitStack() as end:
        end.callback(run.kill)
        if not await started(run, backend_name, stop):
            return
        target = place.target
        log.info("serving %s at %s", backend_name, target)
        (announce or print_line)(
            f'remote_rl: serving {backend_name} at {target} - connect("{target}")'
        )
        lost = await run.over(stop)
    if lost is not None:
        raise lost.copy()
