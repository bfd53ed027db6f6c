"""Use after the end of a session, and in a forked child."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from client_double import Double

from remote_rl import AdamW, Batch, SamplingParams, Session, connect, losses
from remote_rl.errors import ForkedProcessError, LeaseError

CALLS: dict[str, Callable[[Session, Batch], object]] = {
    "forward": lambda rl, batch: rl.training.forward(batch),
    "forward_backward": lambda rl, batch: rl.training.forward_backward(
        batch, losses.CrossEntropy()
    ),
    "custom": lambda rl, batch: rl.training.forward_backward(
        batch, losses.custom(print, framework=None)
    ),
    "optim_step": lambda rl, batch: rl.training.optim_step(AdamW(lr=0.1)),
    "generate": lambda rl, batch: rl.sampling.generate([[1]], SamplingParams(max_tokens=1)),
    "abort": lambda rl, batch: rl.sampling.abort(),
    "sync": lambda rl, batch: rl.weights.sync(),
    "info": lambda rl, batch: rl.info(),
}


@pytest.mark.parametrize("end", ["close", "detach", "with"])
@pytest.mark.parametrize("call", CALLS)
def test_use_after_the_end(call: str, end: str, double: Double, batch: Batch) -> None:
    rl = connect(double)
    if end == "with":
        with rl:
            pass
    else:
        getattr(rl, end)()
    assert "closed" in repr(rl)
    with pytest.raises(LeaseError, match="the session is closed; connect again"):
        CALLS[call](rl, batch)
    assert double.log == []


def test_results_outlive_their_session(rl: Session, batch: Batch) -> None:
    forward = rl.training.forward(batch)
    generate = rl.sampling.generate([[1]], SamplingParams(n=2, max_tokens=2))
    rl.close()
    assert len(forward.result().logprobs) == 3
    assert [sample.index for sample in generate] == [0, 1]
    assert len(generate.result()[0]) == 2
    forward.cancel()  # too late, and no error


def test_detach_ends_what_has_no_outcome(rl: Session, double: Double, batch: Batch) -> None:
    hold = double.hold("forward")
    running = rl.training.forward(batch)
    queued = rl.training.snapshot("a")
    assert hold.reached.wait(60)
    rl.detach()
    rl.detach()  # a second one does nothing
    hold.open()
    for operation in (running, queued):
        with pytest.raises(LeaseError):
            operation.result(60)
    assert double.names() == ["forward"]


def test_closing_ends_the_backend_of_a_run_in_this_process(double: Double) -> None:
    connect(double).close()
    assert double.closed


def test_a_failed_start_closes_the_backend(double: Double) -> None:
    async def start(context: object) -> None:
        raise OSError("no such device")

    double.start = start  # type: ignore[assignment, method-assign]
    with pytest.raises(OSError, match="no such device"):
        connect(double)
    assert double.closed


def test_a_custom_loss_that_outlives_its_session(double: Double, batch: Batch) -> None:
    """Its function returns after the session is gone: nothing is sent, and no thread fails."""
    began, go_on = threading.Event(), threading.Event()

    def slow(given: Batch, outputs: dict[str, object]) -> tuple[float, dict[str, object]]:
        began.set()
        go_on.wait(60)
        return 0.0, {}

    rl = connect(double)
    operation = rl.training.forward_backward(batch, losses.custom(slow, framework=None))
    assert began.wait(60)
    (worker,) = [each for each in threading.enumerate() if each.name == "remote_rl client jobs"]
    rl.detach()
    go_on.set()
    worker.join(60)
    assert not worker.is_alive()
    with pytest.raises(LeaseError, match="closed"):
        operation.result()
    assert double.names() == ["forward"]


FORK = """
import os, sys
sys.path[:0] = sys.argv[2:]
from client_double import Double
from remote_rl import SamplingParams, connect
from remote_rl.errors import ForkedProcessError

target = Double() if sys.argv[1] == "inprocess" else sys.argv[1]
rl = connect(target)
held = rl.sampling.generate([[1]], SamplingParams(max_tokens=1))
held.result()
child = os.fork()
if child == 0:
    calls = {
        "submit": lambda: rl.info(),
        "result": lambda: held.result(),
        "cancel": lambda: held.cancel(),
        "iterate": lambda: next(iter(held)),
        "close": lambda: rl.close(),
        "detach": lambda: rl.detach(),
    }
    failed = []
    for name, call in calls.items():
        try:
            call()
            failed.append(f"{name} returned")
        except ForkedProcessError as error:
            if "connect with its handle" not in str(error):
                failed.append(f"{name}: {error}")
        except BaseException as error:
            failed.append(f"{name}: {error!r}")
    print("child", *failed, flush=True)
    os._exit(len(failed))
_, status = os.waitpid(child, 0)
rl.info().result()  # the parent's session is as it was
rl.close()
print("parent", flush=True)
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize("place", ["inprocess", "http"])
def test_use_in_a_forked_child(place: str, double: Double, servers: Callable[..., object]) -> None:
    target = place if place == "inprocess" else servers(double).url  # type: ignore[attr-defined]
    ended = subprocess.run(
        [sys.executable, "-c", FORK, target, __file__.rpartition("/")[0]],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.stdout.splitlines() == ["child", "parent"], ended.stderr
    assert ended.returncode == 0


def test_the_error_is_a_runtime_error() -> None:
    assert issubclass(ForkedProcessError, RuntimeError)


INTERRUPTED = """
import sys
sys.path[:0] = sys.argv[1:]
from client_double import Double
from remote_rl import Batch, connect, losses
double = Double()
hold = double.hold("forward_backward")
batch = Batch(prompts=[[1]], prompt_index=[0], responses=[[2]], temperature=1.0)
try:
    with connect(double) as rl:
        operations = [
            rl.training.forward_backward(batch, losses.CrossEntropy()) for _ in range(5)
        ]
        assert hold.reached.wait(60)
        print("ready", flush=True)
        operations[-1].result()
except KeyboardInterrupt:
    print(*double.names(), double.closed, all(each.done() for each in operations), flush=True)
"""


def test_ctrl_c_while_waiting() -> None:
    """The wait ends at once, what has not started never runs, and the process can end."""
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, __file__.rpartition("/")[0]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    printed, complaints = process.communicate(timeout=60)
    assert (printed, complaints) == ("forward_backward True True\n", "")
    assert process.returncode == 0


LEFT_OPEN = """
import sys
sys.path[:0] = sys.argv[2:]
from client_double import Double, ended
from remote_rl import Batch, connect, losses
from remote_rl.errors import BackendError
double = Double()
rl = connect(double)
batch = Batch(prompts=[[1]], prompt_index=[0], responses=[[2]], temperature=1.0)
if sys.argv[1] == "failed":
    double.faults["forward", 1] = BackendError("nobody saw it")
    ended(rl.training.forward(batch))
elif sys.argv[1] == "running":
    hold = double.hold("forward")
    running = rl.training.forward(batch)
    assert hold.reached.wait(60)
else:
    rl.training.forward(batch).result()
"""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("failed", "one had failed (nobody saw it)"),
        ("running", "1 operation(s) had not ended"),
        ("nothing", ""),
    ],
)
def test_a_program_that_ends_without_closing_says_what_was_lost(what: str, words: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LEFT_OPEN, what, __file__.rpartition("/")[0]],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert words in ended.stderr
    assert ("use `with connect(...)`" in ended.stderr) == bool(words)
