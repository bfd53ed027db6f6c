"""Arctic backend: vLLM's engine core on a thread of ours (imports flight and the contract).

AsyncLLM would run the core in another process and answer later, so that nobody could say under
which weights a token was drawn. Here the core takes one step after the other, and everything else
happens between two steps, in the order in which it was asked for.
"""

from __future__ import annotations

import math
import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import attrs

from remote_rl.errors import BackendError, describe
from remote_rl.types import FinishReason

from .flight import LOGPROB, Flight, Served

T = TypeVar("T")


@attrs.define(eq=False)
class _Command:
    function: Callable[[], Any]
    future: Future[Any]


class CoreThread:
    """Steps the core while there is something to draw, and runs commands between two steps.

    All public attributes belong to the thread; others touch them by `call` only, or read what is
    one value. served: every version and label by serial number. serial: of what the model holds,
    None where that is a mixture that nothing may be drawn from.
    """

    def __init__(self, create: Callable[[], Any]) -> None:
        self._create = create
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="vllm-core", daemon=True)
        self._lock = threading.Lock()  # of the queue's end: nothing is put behind it
        self._begun: Future[None] = _running_future()
        self._ended: Future[None] = _running_future()
        self._awaiting_none: list[Future[None]] = []
        self.core: Any = None
        self.flights: dict[str, Flight] = {}
        #: flights that came while nobody was let in
        self.waiting: list[Flight] = []
        self.paused = False
        self.asleep = False
        self.closed_to_new = False
        self.served: dict[int, Served] = {}
        self.serial: int | None = None
        self.failure: BackendError | None = None
        #: whether the cache's memory may hold NaN of the weights that are served
        self.tainted = False
        #: tokens drawn since the start
        self.drawn = 0

    def start(self) -> Future[None]:
        """Creates the core; done when it is there."""
        self._thread.start()
        return self._begun

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs a function on the thread, before the next step."""
        future: Future[T] = Future()
        with self._lock:
            if self.failure is None:
                self._commands.put(_Command(function, future))
                return future
        future.set_exception(self.failure.copy())
        return future

    def stop(self) -> Future[None]:
        """Ends the thread and the core; done when both are gone."""
        self._commands.put(None)
        return self._ended

    # -- on the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.core = self._create()
        except Exception as error:  # noqa: BLE001 - belongs to who waits for the start
            self._begun.set_exception(error)
            self._ended.set_result(None)
            return
        self._begun.set_result(None)
        try:
            while self._take_commands():
                if self._busy:
                    self._step()
            self._die(BackendError("the sampling engine was stopped", worker="sampler"))
        except Exception as error:  # noqa: BLE001 - belongs to all who use the core
            self._die(
                BackendError(
                    f"the sampling engine has failed ({describe(error)}) and must be started again",
                    worker="sampler",
                    failed=True,
                    traceback="".join(traceback.format_exception(error)),
                )
            )
        finally:
            self.core.close()
            self._ended.set_result(None)

    @property
    def _busy(self) -> bool:
        return bool(self.flights) and not (self.paused or self.asleep or self.serial is None)

    def _take_commands(self) -> bool:
        """Runs what has come, waits where there is nothing else to do; False at the end."""
        while True:
            try:
                command = self._commands.get(block=not self._busy)
            except queue.Empty:
                return True
            if command is None:
                return False
            if not command.future.set_running_or_notify_cancel():
                continue
            try:
                command.future.set_result(command.function())
            except Exception as error:  # noqa: BLE001 - the caller's to handle
                command.future.set_exception(error)
            del command  # nothing of it is held until the next one comes
            self._tell_none_left()

    def _step(self) -> None:
        ended: list[tuple[Flight, int, FinishReason]] = []
        spoiled: list[Flight] = []
        for drawn in self.core.step():
            flight = self.flights.get(drawn.number)
            if flight is None:
                continue  # it has ended meanwhile
            if any(math.isnan(row[LOGPROB]) for row in drawn.rows):
                spoiled.append(flight)
                continue
            end = flight.take(drawn)
            self.drawn += len(drawn.tokens)
            if end is not None:
                ended.append((flight, *end))
            elif drawn.over is not None:
                raise RuntimeError(f"vLLM ended a sample ({drawn.over}) that was to go on")
        self._leave([flight for flight, _, _ in ended])
        for flight, length, reason in ended:
            self._land(flight, length, reason)
        if spoiled:
            self._fail_spoiled(spoiled)
        self._tell_none_left()

    def _fail_spoiled(self, flights: list[Flight]) -> None:
        """Fails flights whose logits are NaN. Their KV would spoil whoever gets its memory next, as
        vLLM multiplies what is not attended to by zero; so the cache is cleared, and what else
        flies computes its own anew."""
        self._leave(flights)
        self.core.clear_cache()
        for flight in flights:
            row = flight.request.prompt_index
            flight.sink(
                BackendError(
                    f"the model's logits for prompt {row} are NaN after {len(flight.tokens)} "
                    "tokens; look at what was trained or pushed, and sync good weights",
                    worker="sampler",
                    row=row,
                )
            )

    def _die(self, failure: BackendError) -> None:
        """The core is no more: everything that flies fails, and all that comes later."""
        with self._lock:
            self.failure = failure
        flights = (*self.flights.values(), *self.waiting)
        self.flights, self.waiting = {}, []
        for flight in flights:
            flight.sink(failure.copy())
        self._tell_none_left()
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None and command.future.set_running_or_notify_cancel():
                command.future.set_exception(failure.copy())

    # -- what commands do ---------------------------------------------------------------------

    def board(self, flights: Sequence[Flight]) -> None:
        """Lets flights in, or has them wait where nobody is let in."""
        for flight in flights:
            if self.serial is None:
                flight.sink(self.unknown())
            elif self.closed_to_new:
                self.waiting.append(flight)
            else:
                self.core.add(flight, self.serial)
                self.flights[flight.number] = flight

    def renew_cache(self, recompute: bool) -> None:
        """For new weights: forgets the KV of the old ones, or, without recompute, leaves it to
        those that run; nobody who comes finds it."""
        if self.tainted and not self.asleep:  # who wakes clears it
            self.core.clear_cache()
        elif recompute or not self.flights:
            self.core.drop_cache()
        self.tainted = False

    def unknown(self) -> BackendError:
        """What generates fail with while the model holds no version's weights."""
        return BackendError(
            "the sampler holds no version's weights: it has just started, or an update failed "
            "half-way; sync again",
            worker="sampler",
        )

    def fall_asleep(self) -> None:
        """Gives memory up; what flies is held."""
        self._moved("put to sleep", lambda: self.core.sleep())
        self.asleep = True

    def wake_up(self, whole: bool) -> None:
        """Takes memory back; whole, and what flies goes on."""
        self._moved("woken", lambda: self.core.wake(whole))
        if whole:
            self.asleep = self.tainted = False

    def _moved(self, what: str, move: Callable[[], None]) -> None:
        try:
            move()
        except Exception as error:
            raise BackendError(
                f"the sampling engine could not be {what} ({describe(error)}) and must be started "
                "again",
                worker="sampler",
                failed=True,
                traceback="".join(traceback.format_exception(error)),
            ) from error

    def admit(self) -> None:
        """Lets in whoever waits, and whoever comes."""
        self.closed_to_new = False
        waiting, self.waiting = self.waiting, []
        self.board(waiting)

    def abort(self, chosen: Callable[[Flight], bool], waiting: bool = True) -> None:
        """Ends flights early with what they have; those too that wait to be let in."""
        flying = [flight for flight in self.flights.values() if chosen(flight)]
        self._leave(flying)
        idle = [flight for flight in self.waiting if waiting and chosen(flight)]
        self.waiting = [flight for flight in self.waiting if flight not in idle]
        for flight in (*flying, *idle):
            self._land(flight, len(flight.tokens), "abort")

    def fail_all(self, error: BackendError) -> None:
        """Ends everything with this error."""
        flying, idle = list(self.flights.values()), self.waiting
        self._leave(flying)
        self.waiting = []
        for flight in (*flying, *idle):
            flight.sink(error.copy())

    def none_left(self) -> Future[None]:
        """Done as soon as nothing flies."""
        future = _running_future()
        self._awaiting_none.append(future)
        return future

    def _tell_none_left(self) -> None:
        if not self.flights:
            waiting, self._awaiting_none = self._awaiting_none, []
            for future in waiting:
                future.set_result(None)

    def _leave(self, flights: list[Flight]) -> None:
        # nobody has seen what was computed for those that have no token yet
        self.tainted |= not all(flight.tokens for flight in flights)
        for flight in flights:
            del self.flights[flight.number]
        self.core.drop([flight.number for flight in flights])

    def _land(self, flight: Flight, length: int, reason: FinishReason) -> None:
        assert self.serial is not None  # a flight can't outlive a failed update
        flight.sink(flight.sample(length, reason, self.served, self.served[self.serial]))


def _running_future() -> Future[None]:
    """One that who waits for it can't cancel."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future
