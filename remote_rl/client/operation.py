"""Client: the future that every call returns, for blocking and async code alike (imports the
contract and progress)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..errors import DirtyGradientsError, RemoteRLError
from ..messages import ProgressReport
from ..ops import Operation as Row
from ..types.generation import Group, Sample
from .progress import watched_result

if TYPE_CHECKING:
    from .connection import Connection

T = TypeVar("T")


_NOT_YET = object()


class Call:
    """What a connection keeps of one operation; its public side is `Operation`.

    convert: from the dispatcher's response to the caller's result.
    observed: somebody was given the outcome. held: the caller still has the Operation.
    cancel_asked: the caller wanted it not to run.
    listeners: called, on the session's loop, when samples or the outcome have come.
    """

    def __init__(
        self,
        connection: Connection,
        row: Row,
        number: int,
        convert: Callable[[Any], Any],
    ) -> None:
        self.connection = connection
        self.row = row
        self.number = number
        self.convert = convert
        self.future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.future.set_running_or_notify_cancel()
        self.progress: ProgressReport | None = None
        self.samples: list[Sample] = []
        self.streaming = False
        self.generates_before = 0
        self.changed = threading.Condition()
        self.converting = threading.Lock()
        self.result: Any = _NOT_YET
        self.listeners: list[Callable[[], None]] = []
        self.observed = False
        self.held = True
        self.cancel_asked = False

    @property
    def key(self) -> tuple[str, int]:
        """(stream, number)."""
        return (self.row.stream.value, self.number)

    @property
    def request_id(self) -> str:
        """As the dispatcher names it."""
        return f"{self.connection.client_id}:{self.row.stream.value}:{self.number}"

    @property
    def error(self) -> BaseException | None:
        """The failure, if it has ended in one."""
        return self.future.exception() if self.future.done() else None

    def finish(self, response: Any = None, error: BaseException | None = None) -> None:
        """The outcome; a second one is ignored."""
        with self.changed:
            if self.future.done():
                return
            if error is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result(response)
            self._tell()

    def add_samples(self, start: int, samples: list[Sample]) -> None:
        """Samples that have finished; those already held are passed over."""
        with self.changed:
            self.samples += samples[max(0, len(self.samples) - start) :]
            self._tell()

    def _tell(self) -> None:
        self.changed.notify_all()
        for listener in list(self.listeners):
            listener()

    def outcome(self) -> Any:
        """The result of an ended call, or its error raised; either is now observed."""
        self.observed = True
        error = self.future.exception()
        if error is None:
            return self._converted()
        if isinstance(error, DirtyGradientsError):
            self.connection.failures.observe_before(self)
        raise error.copy() if isinstance(error, RemoteRLError) else error

    def own_outcome(self) -> Any:
        """Waits for the end and gives the outcome of this call alone: other operations' failures
        are for the caller to hear."""
        concurrent.futures.wait([self.future])
        return self.outcome()

    def _converted(self) -> Any:
        # on the caller's thread, once: on the loop, a long conversion would hold up the lease
        with self.converting:
            if self.result is _NOT_YET:
                self.result = self.convert(self.future.result())
            return self.result


class Operation(Generic[T]):
    """A call that was submitted: `.result()`, or `await` it.

    It is in order and under way as soon as the call returned; waiting is up to the caller. A
    failure of one that nobody holds any more surfaces at the next `.result()` of its session, and
    at the latest when the session closes.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        weakref.finalize(self, _let_go, call).atexit = False

    def result(self, timeout: float | None = None) -> T:
        """Waits and returns the result, or raises the failure.

        timeout: seconds; after them `TimeoutError`, which cancels nothing: ask again.
        """
        self._call.connection.check_process()
        watched_result(self._call, timeout)
        self._call.connection.failures.raise_dropped(self._call)
        outcome: T = self._call.outcome()
        return outcome

    def __await__(self) -> Generator[Any, None, T]:
        self._call.connection.check_process()
        return self._wait_for_it().__await__()

    async def _wait_for_it(self) -> T:
        ended = asyncio.wrap_future(self._call.future)
        ended.add_done_callback(_look_at)
        # a cancelled awaiter must not cancel the operation, nor take its outcome
        await asyncio.wait([ended])
        self._call.connection.failures.raise_dropped(self._call)
        outcome: T = self._call.outcome()
        return outcome

    def done(self) -> bool:
        """Whether the outcome is there."""
        self._call.connection.check_process()
        return self._call.future.done()

    def cancel(self) -> None:
        """Asks that it not start; a generate that runs ends early. The outcome tells:
        `OperationCancelled`, or the result where it came too late. A cancelled forward_backward
        counts as a failed one."""
        self._call.connection.check_process()
        self._call.connection.cancel(self._call)

    @property
    def progress(self) -> ProgressReport | None:
        """What it last said of itself, None before."""
        self._call.connection.check_process()
        return self._call.progress

    @property
    def request_id(self) -> str:
        """Its name in the run, for `abort` and logs."""
        return self._call.request_id

    def __repr__(self) -> str:
        if not self._call.future.done():
            state = "pending"
        else:
            state = "failed" if self._call.error is not None else "done"
        return f"Operation({self._call.row.name} {self._call.number}, {state})"


def _let_go(call: Call) -> None:
    call.held = False


def _look_at(future: asyncio.Future[Any]) -> None:
    """Takes note of the failure, so that asyncio doesn't log it beside raising it."""
    if not future.cancelled():
        future.exception()


class GenerateOperation(Operation[tuple[Group, ...]]):
    """A generate: besides the groups as its result, its samples in the order they finish.

        for sample in rl.sampling.generate(prompts, params): ...

    Every sample comes once; `sample.prompt_index` and `sample.index` say which it is.
    """

    def __iter__(self) -> Iterator[Sample]:
        call = self._call
        call.connection.check_process()
        call.connection.stream(call)
        given: set[tuple[int, int]] = set()
        while True:
            with call.changed:
                while len(call.samples) <= len(given) and not call.future.done():
                    call.changed.wait()
            fresh = _fresh(call, given)
            if not fresh and call.future.done():
                return
            yield from fresh

    async def __aiter__(self) -> AsyncIterator[Sample]:
        call = self._call
        call.connection.check_process()
        call.connection.stream(call)
        loop = asyncio.get_running_loop()
        news = asyncio.Event()

        def tell() -> None:
            try:
                loop.call_soon_threadsafe(news.set)
            except RuntimeError:
                pass  # that loop has been closed, and the iteration with it

        given: set[tuple[int, int]] = set()
        call.listeners.append(tell)
        try:
            while True:
                news.clear()
                ended = call.future.done()
                fresh = _fresh(call, given)
                for sample in fresh:
                    yield sample
                if ended:
                    return
                if not fresh:
                    await news.wait()
        finally:
            call.listeners.remove(tell)


def _fresh(call: Call, given: set[tuple[int, int]]) -> list[Sample]:
    if call.future.done():
        groups = call.outcome()
        samples = [sample for group in groups for sample in group]
    else:
        samples = call.samples[len(given) :]
    fresh = [sample for sample in samples if (sample.prompt_index, sample.index) not in given]
    given.update((sample.prompt_index, sample.index) for sample in fresh)
    return fresh
