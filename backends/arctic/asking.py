"""Arctic backend: what several sampling engines answer to one question (imports the contract; no
Ray, since whoever asks may stand in for them)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from remote_rl.errors import BackendError, RemoteRLError
from remote_rl.types import Label

if TYPE_CHECKING:
    from .sampler_worker import SamplerWorker


async def asked(
    workers: Iterable[SamplerWorker],
    method: str,
    *arguments: Any,
    failed: Callable[[], None] = lambda: None,
    within: float | None = None,
) -> list[Any]:
    """What each answers, or the error that it raised. failed: called as soon as one does. within:
    seconds after which an engine hangs, and is ended; None waits for as long as it lives."""

    async def ask(worker: SamplerWorker) -> Any:
        try:
            return await answered(worker, within, method, *arguments)
        except RemoteRLError:
            failed()
            raise

    return await asyncio.gather(*(ask(each) for each in workers), return_exceptions=True)


async def answered(
    worker: SamplerWorker, within: float | None, method: str, *arguments: Any
) -> Any:
    """As `SamplerWorker.ask`; an engine that takes more seconds than `within` is ended."""
    try:
        async with asyncio.timeout(within):
            return await worker.ask(method, *arguments)
    except TimeoutError:
        worker.give_up(f"did not answer {method} within {within:g} s")
        assert worker.failure is not None, "given up now, or gone before"
        raise worker.failure.copy() from None


async def serve_on(workers: Iterable[SamplerWorker], served: tuple[int | None, Label]) -> None:
    """After a failed delivery: engines that refused before a byte had moved serve what they did, a
    version and its label; all or none."""
    living = [each for each in workers if each.synced]
    states = await asked(living, "serving")
    same = all(state == served or is_death(state) for state in states)
    for worker in living:
        worker.synced = worker.synced and same


def most_telling(failures: Iterable[BaseException]) -> BaseException:
    """Of a broadcast: a death, else what somebody found by itself, else that another one left."""
    return min(failures, key=lambda each: (not is_death(each), is_of_the_group(each)))


def is_of_the_group(error: BaseException | None) -> bool:
    """Whether it only says that the other side of a broadcast is gone."""
    return isinstance(error, RemoteRLError) and error.details.get("group") is True


def is_death(answer: object) -> bool:
    """Whether an engine has died, rather than answered, refused or failed in one request."""
    return isinstance(answer, BackendError) and answer.details.get("died") is True
