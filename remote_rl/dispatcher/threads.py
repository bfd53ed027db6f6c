"""Dispatcher: threads for a backend's blocking calls, which never keep the process from ending
(imports concurrent.futures and threading)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

import attrs

T = TypeVar("T")


@attrs.frozen(eq=False)
class _Job:
    future: Future[Any]
    call: Callable[[], Any]

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.call()
        except BaseException as error:  # noqa: BLE001 - the future's owner gets whatever it is
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class Threads(Executor):
    """Up to `count` daemon threads, begun as they are needed.

    A `ThreadPoolExecutor` waits at the interpreter's end for every thread, and a call of an engine
    that hangs would keep a server from stopping, or a user's program from ending, for ever.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Runs `fn` on a thread; RuntimeError after `shutdown`."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the run is over, and no backend method begins anything")
            self._jobs.put(_Job(future, lambda: fn(*args, **kwargs)))
            if self._idle:
                self._idle -= 1  # it will take this job
            elif len(self._threads) < self._count:
                name = f"{self._name} {len(self._threads)}"
                thread = threading.Thread(target=self._serve, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            del job  # a result is not held until the next one
            with self._lock:
                self._idle += 1

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Takes nothing more; the threads end after what they have."""
        with self._lock:
            self._closed = True
            if cancel_futures:
                self._cancel_waiting()
            for _ in self._threads:
                self._jobs.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _cancel_waiting(self) -> None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            if job is not None:
                job.future.cancel()
