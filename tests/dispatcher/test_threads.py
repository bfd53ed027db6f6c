"""Threads for an engine's blocking calls: as many as allowed, and none that holds up an end."""

import subprocess
import sys
import threading
from concurrent.futures import CancelledError

import pytest

from remote_rl.dispatcher.threads import Threads


def test_results_and_failures_reach_the_caller():
    threads = Threads(2, "test")
    assert threads.submit(divmod, 7, 3).result(60) == (2, 1)
    with pytest.raises(ZeroDivisionError):
        threads.submit(divmod, 7, 0).result(60)
    with pytest.raises(SystemExit):
        threads.submit(sys.exit, 3).result(60)
    assert threads.submit(threading.current_thread).result(60).daemon
    threads.shutdown()


def test_there_are_as_many_as_needed_and_no_more_than_allowed():
    threads, go_on = Threads(3, "test"), threading.Event()
    assert threads._threads == []
    threads.submit(int).result(60)
    assert len(threads._threads) == 1
    together = threading.Barrier(4)
    waiting = [threads.submit(together.wait, 60) for _ in range(3)]
    together.wait(60)  # three at once
    queued = [threads.submit(go_on.wait, 60) for _ in range(50)]
    assert len(threads._threads) == 3
    go_on.set()
    for future in [*waiting, *queued]:
        future.result(60)
    threads.shutdown()
    assert not any(thread.is_alive() for thread in threads._threads)


def test_after_the_shutdown_nothing_begins():
    threads, go_on, begun = Threads(1, "test"), threading.Event(), threading.Event()

    def first():
        begun.set()
        return go_on.wait(60)

    running, queued = threads.submit(first), threads.submit(int)
    assert begun.wait(60)
    threads.shutdown(wait=False, cancel_futures=True)
    with pytest.raises(CancelledError):
        queued.result(60)
    with pytest.raises(RuntimeError, match="the run is over"):
        threads.submit(int)
    go_on.set()
    assert running.result(60)


HANGS = """
import threading
from remote_rl.dispatcher.threads import Threads
begun = threading.Event()
def hang():
    begun.set()
    threading.Event().wait()
Threads(1, "test").submit(hang)
begun.wait()
print("the end")
"""


def test_a_call_that_never_returns_does_not_keep_the_process():
    ended = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "the end\n"
