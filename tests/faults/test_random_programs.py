"""Whatever a program does and whatever is lost on the way, its outcomes are those of the run
without faults: bits, versions, and errors by their class."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

from faults_support import (
    BATCHES,
    LOSS,
    NIGHTLY,
    PATIENCE,
    Ended,
    bits_of,
    end_state,
    small_mock,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from remote_rl import AdamW, Batch, Operation, SamplingParams, Session, connect
from remote_rl.errors import RemoteRLError
from remote_rl.testing import LoopbackServer
from remote_rl.testing.faults import Faults

UNKNOWN_ID = Batch(prompts=[[1]], prompt_index=[0], responses=[[99]], temperature=1.0)
NAMES = st.sampled_from(["x", "y"])
#: an operation's name and its argument; several of them are refused, depending on what came before
STEPS = st.one_of(
    st.tuples(st.just("forward_backward"), st.integers(0, 6)),
    st.tuples(st.just("forward_backward of an unknown id"), st.none()),
    st.tuples(st.just("optim_step"), st.sampled_from([0.01, 0.1])),
    st.tuples(st.sampled_from(["zero_grad", "sync", "version", "reset"]), st.none()),
    st.tuples(
        st.sampled_from(["snapshot", "restore_snapshot", "drop_snapshot", "set_reference"]), NAMES
    ),
    st.tuples(st.sampled_from(["save", "load", "delete", "export"]), NAMES),
    st.tuples(st.just("forward"), st.sampled_from(["current", "reference", "x", "y"])),
    st.tuples(st.just("generate"), st.integers(1, 3)),
    st.tuples(st.just("await all"), st.none()),
)
PROGRAMS = st.lists(STEPS, max_size=16)
LIKELY = st.sampled_from([0.0, 0.05, 0.2])
FAULTS = st.builds(
    Faults,
    seed=st.integers(0, 10_000),
    lose_request=LIKELY,
    lose_response=LIKELY,
    cut_request=LIKELY,
    cut_response=LIKELY,
    duplicate=st.sampled_from([0.0, 0.2, 1.0]),
    delay=LIKELY,
    delay_seconds=st.just(0.003),
    reorder=LIKELY,
    reorder_seconds=st.just(0.005),
)
#: each of them breaks the second forward_backward, the first step, ... or nothing
FAILURES = st.sampled_from(
    [
        (),
        ({"operation": "forward_backward", "call": 2},),
        ({"operation": "optim_step", "call": 2},),
        ({"operation": "save", "when": "after"}, {"operation": "generate"}),
    ]
)


def begun(rl: Session, name: str, argument: Any) -> Operation[Any]:
    """One step of a program."""
    training = rl.training
    if name == "forward_backward":
        return training.forward_backward(BATCHES[argument], LOSS)
    if name == "forward_backward of an unknown id":
        return training.forward_backward(UNKNOWN_ID, LOSS)
    if name == "optim_step":
        return training.optim_step(AdamW(lr=argument))
    if name == "forward":
        return training.forward(BATCHES[0], policy=argument)
    if name == "generate":
        return rl.sampling.generate([[1, 2]], SamplingParams(n=argument, max_tokens=3))
    if name in ("sync", "version"):
        return getattr(rl.weights, name)()
    if name == "reset":
        return rl.reset()
    return getattr(training, name)(*(() if argument is None else (argument,)))


def outcome(operation: Operation[Any]) -> Any:
    """Bits of the result, or the error's class."""
    try:
        result = operation.result(PATIENCE)
    except RemoteRLError as error:
        return type(error).__name__
    if operation.request_id.split(":")[1] == "sampling":
        return [sample.tokens.tolist() for group in result for sample in group]
    bits = bits_of(result)
    if isinstance(bits, dict):  # when and where it was written is of the run
        bits = {key: value for key, value in bits.items() if key not in ("created", "path")}
    return bits


def outcomes(rl: Session, program: Any) -> list[Any]:
    """Of all steps, in the order of the calls."""
    bits: list[Any] = []
    pending: list[Operation[Any]] = []
    for name, argument in program:
        if name in ("await all", "generate"):  # which weights a generate meets is to be defined
            bits += [outcome(operation) for operation in pending]
            pending.clear()
        if name == "await all":
            continue
        try:
            operation = begun(rl, name, argument)
        except RemoteRLError as error:
            bits.append(type(error).__name__)
            continue
        if name == "generate":
            bits.append(outcome(operation))
        else:
            pending.append(operation)
    return bits + [outcome(operation) for operation in pending]


def run(program: Any, failures: Any, over: str, faults: Faults | None) -> Ended:
    """A program on a fresh run, and where it ended."""
    wrap = None if faults is None else faults.wrap
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        backend = small_mock(faults=failures)
        if over == "http":
            server = LoopbackServer(backend, checkpoint_dir=folder)
            stack.callback(server.stop)
            rl = stack.enter_context(connect(server.url, wrap_transport=wrap))
        else:
            rl = connect(backend, checkpoint_dir=folder, wrap_transport=wrap)
            stack.enter_context(rl)
        bits = outcomes(rl, program)
        rl.training.zero_grad().result(PATIENCE)
        try:
            return Ended(bits, end_state(rl, folder))
        except RemoteRLError as error:  # after a step that failed, nobody knows the weights
            return Ended(bits, {"unknown": type(error).__name__})


def check(program: Any, failures: Any, faults: Faults, over: str) -> None:
    assert run(program, failures, over, faults) == run(program, failures, "inprocess", None)


@given(PROGRAMS, FAILURES, FAULTS)
@settings(max_examples=150 if NIGHTLY else 20)
def test_faults_change_no_outcome_in_process(program: Any, failures: Any, faults: Faults) -> None:
    check(program, failures, faults, "inprocess")


@given(PROGRAMS, FAILURES, FAULTS)
@settings(max_examples=60 if NIGHTLY else 8)
def test_faults_change_no_outcome_over_http(program: Any, failures: Any, faults: Faults) -> None:
    check(program, failures, faults, "http")
