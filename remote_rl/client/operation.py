"""Client: the future that every call returns, for blocking and async code alike (imports the
contract, ending and progress)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..errors import DirtyGradientsError, RemoteRLError
from ..messages import ProgressReport
from ..ops import Operation as Row
from ..ops import Stream
from ..types.generation import Group, Sample
from .ending import Ending
from .progress import watched_result

if TYPE_CHECKING:
    from .connection import Connection

T = TypeVar("T")


_NOT_YET = object()
_SAMPLING = Stream.SAMPLING.value


def as_it_is(response: Any) -> Any:
    """The `convert` of most operations: the response is the result."""
    return response


class Call:
    """What a connection keeps of one operation; its public side is `Operation`.

    ending: its outcome. convert: from the dispatcher's response to the caller's result.
    observed: somebody was given the outcome. held: the caller still has the Operation.
    cancel_asked: the caller wanted it not to run. refusal: why the run did not accept it.
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
        self.key = (row.stream_name, number)
        self.convert = convert
        self.ending = Ending()
        self.progress: ProgressReport | None = None
        self.samples: list[Sample] = []
        self.streaming = False
        self.generates_before = 0
        #: of the samples of a generate; nothing else is iterated
        self.changed = threading.Condition() if row.stream_name == _SAMPLING else None
        self.converting = threading.Lock()
        self.result: Any = _NOT_YET
        self.listeners: list[Callable[[], None]] = []
        self.observed = False
        self.held = True
        self.cancel_asked = False
        self.refusal: RemoteRLError | None = None

    @property
    def request_id(self) -> str:
        """As the dispatcher names it."""
        return f"{self.connection.client_id}:{self.row.stream_name}:{self.number}"

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.ending.done

    @property
    def error(self) -> BaseException | None:
        """The failure, if it has ended in one."""
        return self.ending.error

    def finish(self, response: Any = None, error: BaseException | None = None) -> None:
        """The outcome; a second one is ignored."""
        if self.ending.tell(response, error) and (self.listeners or self.changed is not None):
            self._tell()

    def add_samples(self, start: int, samples: list[Sample]) -> None:
        """Samples that have finished; those already held are passed over."""
        self.samples += samples[max(0, len(self.samples) - start) :]
        self._tell()

    def _tell(self) -> None:
        if self.changed is not None:
            with self.changed:
                self.changed.notify_all()
        for listener in list(self.listeners):
            listener()

    def outcome(self) -> Any:
        """The result of an ended call, or its error raised; either is now observed."""
        self.observed = True
        error = self.ending.error
        if error is None:
            return self.ending.response if self.convert is as_it_is else self._converted()
        if isinstance(error, DirtyGradientsError):
            self.connection.failures.observe_before(self)
        raise error.copy() if isinstance(error, RemoteRLError) else error

    def own_outcome(self) -> Any:
        """Waits for the end and gives the outcome of this call alone: other operations' failures
        are for the caller to hear."""
        self.ending.wait()
        return self.outcome()

    def _converted(self) -> Any:
        # on the caller's thread, once: on the loop, a long conversion would hold up the lease
        with self.converting:
            if self.result is _NOT_YET:
                self.result = self.convert(self.ending.response)
            return self.result


class Operation(Generic[T]):
    """A call that was submitted: `.result()`, or `await` it.

    It is in order and under way as soon as the call returned; waiting is up to the caller. A
    failure of one that nobody holds any more surfaces at the next `.result()` of its session, and
    at the latest when the session closes.
    """

    def __init__(self, call: Call) -> None:
        self._call = call

    def __del__(self) -> None:
        self._call.held = False

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
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            _on_loop(loop, ended.set)

        self._call.listeners.append(tell)
        try:
            if not self._call.done:
                await ended.wait()
        finally:
            self._call.listeners.remove(tell)
        self._call.connection.failures.raise_dropped(self._call)
        outcome: T = self._call.outcome()
        return outcome

    def done(self) -> bool:
        """Whether the outcome is there."""
        self._call.connection.check_process()
        return self._call.done

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
        if not self._call.done:
            state = "pending"
        else:
            state = "failed" if self._call.error is not None else "done"
        return f"Operation({self._call.row.name} {self._call.number}, {state})"


def _on_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:
        pass  # that loop has been closed, and what waited in it is gone


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
        assert call.changed is not None
        while True:
            with call.changed:
                while len(call.samples) <= len(given) and not call.done:
                    call.changed.wait()
            fresh = _fresh(call, given)
            if not fresh and call.done:
                return
            yield from fresh

    async def __aiter__(self) -> AsyncIterator[Sample]:
        call = self._call
        call.connection.check_process()
        call.connection.stream(call)
        loop = asyncio.get_running_loop()
        news = asyncio.Event()

        def tell() -> None:
            _on_loop(loop, news.set)

        given: set[tuple[int, int]] = set()
        call.listeners.append(tell)
        try:
            while True:
                news.clear()
                ended = call.done
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
    if call.done:
        groups = call.outcome()
        samples = [sample for group in groups for sample in group]
    else:
        samples = call.samples[len(given) :]
    fresh = [sample for sample in samples if (sample.prompt_index, sample.index) not in given]
    given.update((sample.prompt_index, sample.index) for sample in fresh)
    return fresh
