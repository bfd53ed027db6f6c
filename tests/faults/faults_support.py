"""Small runs under faults: a mock of a few dozen weights, training programs, and what a run is in
the end, as bits."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from command_support import PATIENCE, address

from backends.mock import create
from remote_rl import AdamW, Batch, Operation, Session, connect, losses
from remote_rl.messages import Transport
from remote_rl.testing.faults import Faults

SMALL: dict[str, Any] = {
    "vocab_size": 8,
    "window": 1,
    "embedding_size": 2,
    "hidden_size": 2,
    "initial_scale": 1.0,
    "eos_token_ids": (),
    "seed": 5,
}
LOSS = losses.CrossEntropy()
NIGHTLY = os.environ.get("REMOTE_RL_NIGHTLY") == "1"
#: probabilities of every fault, of about one message in ten in all
EVERYTHING: dict[str, float] = {
    "lose_request": 0.01,
    "lose_response": 0.01,
    "cut_request": 0.01,
    "cut_response": 0.01,
    "duplicate": 0.02,
    "delay": 0.02,
    "delay_seconds": 0.005,
    "reorder": 0.02,
    "reorder_seconds": 0.01,
}
KINDS = tuple(name for name in EVERYTHING if not name.endswith("_seconds"))
Wrap = Callable[[Transport], Transport]


def small_mock(**options: Any) -> Any:
    """A mock backend of a few dozen weights; ids 0 to 7, no end of sequence."""
    return create(**{**SMALL, **options})


def everything(seed: int, **changes: float) -> Faults:
    """All faults at once."""
    return Faults(seed=seed, **{**EVERYTHING, **changes})


@contextlib.contextmanager
def served(folder: Path, *arguments: str) -> Iterator[str]:
    """The address of `remote-rl serve` of such a mock, in a process of its own."""
    options = [f"--set={name}={json.dumps(value)}" for name, value in SMALL.items()]
    command = [sys.executable, "-m", "remote_rl", "serve", "mock", "--port", "0", *options]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--checkpoint-dir", str(folder / "run"), *arguments],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    with process:
        try:
            yield address(process)
            process.terminate()
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
    assert "Traceback" not in (folder / "log").read_text()


# -- programs -------------------------------------------------------------------------------------


def batch_of(number: int) -> Batch:
    """One or two short responses, another for each number."""
    generator = np.random.default_rng(number)
    rows = 1 + number % 2
    return Batch(
        prompts=[generator.integers(0, 8, 2)],
        prompt_index=[0] * rows,
        responses=[generator.integers(0, 8, 1 + row) for row in range(rows)],
        temperature=1.0,
    )


BATCHES = [batch_of(number) for number in range(7)]


def bits_of(result: Any) -> Any:
    """What of a training result is the same in every run, floats as bytes."""
    if attrs.has(type(result)):
        fields = attrs.asdict(result, recurse=False)
        return {name: bits_of(value) for name, value in fields.items() if name != "seconds"}
    if isinstance(result, float):
        return np.float64(result).tobytes()
    if hasattr(result, "tobytes"):
        return result.tobytes()
    if hasattr(result, "offsets"):
        return result.offsets.tobytes(), result.values.tobytes()
    if hasattr(result, "items"):
        return {name: bits_of(value) for name, value in result.items()}
    if isinstance(result, (list, tuple)):
        return [bits_of(item) for item in result]
    return result


def ten_operations(rl: Session, turn: int) -> Iterator[Operation[Any]]:
    """One step, of one or two gradients, a gradient that is thrown away, and what else there is
    in the order. Few of them compute much: it is the order that is tested."""
    training = rl.training
    yield training.snapshot("before")
    yield training.forward_backward(BATCHES[turn % 7], LOSS)
    if turn % 2:
        yield training.forward_backward(BATCHES[turn % 5], LOSS)
    else:
        yield training.set_reference("base" if turn % 4 else "before")
    yield training.optim_step(AdamW(lr=0.01))
    yield rl.weights.sync(label=turn)
    if turn % 4 == 3:
        yield training.forward(BATCHES[turn % 3], policy="before")
    else:
        yield rl.weights.version()
    yield training.forward_backward(BATCHES[turn % 3], LOSS)
    if turn % 5 == 0:
        yield training.restore_snapshot("before")
    else:
        yield training.zero_grad()
    yield training.drop_snapshot("before")
    yield rl.weights.version()


def train(rl: Session, operations: int, at_once: int = 1000) -> list[Any]:
    """That many training operations, pipelined; the bits of all their results."""
    bits: list[Any] = []
    pending: list[Operation[Any]] = []
    for turn in range(operations // 10):
        pending += ten_operations(rl, turn)
        if len(pending) >= at_once:
            bits += [bits_of(operation.result(PATIENCE)) for operation in pending]
            pending.clear()
    return bits + [bits_of(operation.result(PATIENCE)) for operation in pending]


# -- what a run is in the end ---------------------------------------------------------------------


def end_state(rl: Session, folder: Path, name: str = "end") -> dict[str, Any]:
    """Weights, optimizer, reference, versions and seeds of a run that saves below `folder`."""
    info = rl.training.save(name).result(PATIENCE)
    versions = rl.weights.version().result(PATIENCE)
    saved = folder / "checkpoints" / name
    state = {
        str(path.relative_to(saved)): path.read_bytes()
        for path in sorted((saved / "state").rglob("*"))
        if path.is_file()
    }
    assert len(state) > 1
    counters = json.loads((saved / "manifest.json").read_text())["counters"]
    return {**state, "version": info.version, "versions": versions, "counters": counters}


@attrs.frozen
class Ended:
    """bits: of every result, in order. state: of the run."""

    bits: list[Any]
    state: dict[str, Any]


def in_process(
    folder: Path, program: Callable[[Session], list[Any]], wrap: Wrap | None = None
) -> Ended:
    """The program on a run of its own in this process."""
    with connect(small_mock(), checkpoint_dir=folder, wrap_transport=wrap) as rl:
        return Ended(program(rl), end_state(rl, folder))


def over_http(
    folder: Path, url: str, program: Callable[[Session], list[Any]], wrap: Wrap | None = None
) -> Ended:
    """The program on the run that is served at `url` and saves below `folder`."""
    with connect(url, wrap_transport=wrap) as rl:
        return Ended(program(rl), end_state(rl, folder))
