"""Arctic backend: one training rank in its Ray worker (imports ray, cluster and the contract;
training.rank in the worker)."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from typing import Any

import attrs
import ray

from remote_rl.errors import BackendError, RemoteRLError, describe

from .cluster import begin_worker, free_port
from .config import ArcticConfig
from .engine_factory import on_cpu
from .leftovers import Owner
from .training.answers import RankSettings


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

        return outcome_of(make)

    def run(self, method: str, arguments: tuple[Any, ...]) -> Outcome:
        """One method of the rank."""

        def work() -> Any:
            result = getattr(self._rank, method)(*arguments)
            self._rank.settle()
            return result

        return outcome_of(work)

    @ray.method(concurrency_group="watch")
    def here(self) -> None:
        """Answers, also while the rank works."""

    @ray.method(concurrency_group="watch")
    def pulse(self) -> int:
        """Rises with each piece of work that the rank does."""
        return 0 if self._rank is None else int(self._rank.pulse)

    @ray.method(concurrency_group="watch")
    def call_off(self, group: str) -> None:
        """Ends what the rank waits for in this group."""
        if self._rank is not None:
            self._rank.call_off(group)


def outcome_of(function: Callable[[], Any]) -> Outcome:
    begin = time.perf_counter()
    try:
        return Outcome(value=function(), seconds=time.perf_counter() - begin)
    except BaseException as error:  # noqa: BLE001 - MemoryError and all: the caller hears it
        known = error if isinstance(error, RemoteRLError) else BackendError(describe(error))
        return Outcome(error=known, trace=traceback.format_exc())
