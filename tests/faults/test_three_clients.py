"""A driver and two members on one run, each behind faults of its own, end where they would without
faults, bit for bit."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from faults_support import (
    BATCHES,
    KINDS,
    LOSS,
    NIGHTLY,
    PATIENCE,
    Ended,
    bits_of,
    end_state,
    everything,
    served,
    ten_operations,
)

from remote_rl import AdamW, Session, connect
from remote_rl.testing.faults import Faults

#: seeds whose faults are not the same for equal numbers
SEEDS = (11, 12, 13)
#: of fifty operations each
TURNS = 201 if NIGHTLY else 6


@contextlib.contextmanager
def three_clients(url: str, faults: list[Faults] | None) -> Iterator[list[Session]]:
    """A driver, and two members by its handle."""
    with contextlib.ExitStack() as stack:
        target: Any = url
        sessions: list[Session] = []
        for place in range(3):
            wrap = None if faults is None else faults[place].wrap
            sessions.append(connect(target, wrap_transport=wrap))
            target = sessions[0].handle()
        for session in sessions:  # the driver's lease, and with it theirs, is to end last
            stack.enter_context(session)
        yield sessions


def alternating(sessions: list[Session]) -> list[Any]:
    """All accumulate into one gradient, in turn; equal numbers of theirs carry equal requests."""
    bits = []
    for turn in range(40):
        for place in range(3):
            client = sessions[(turn + place) % 3]
            # the same request from each: only their ids tell them apart
            bits.append(client.training.forward_backward(BATCHES[turn % 7], LOSS).result(PATIENCE))
        step = sessions[turn % 3].training.optim_step(AdamW(lr=0.01))
        bits.append(step.result(PATIENCE))
    return [bits_of(result) for result in bits]


def pipelines_in_turn(sessions: list[Session]) -> list[Any]:
    """Each in a thread: who has the turn submits fifty operations at once; the others ask for
    the version meanwhile, in the same lane."""
    bits: dict[int, list[Any]] = {}
    turn_ended = [threading.Event() for _ in range(TURNS)]
    failures: list[BaseException] = []

    def client(place: int) -> None:
        rl = sessions[place]
        try:
            for turn in range(TURNS):
                if turn % 3 == place:
                    operations = [
                        operation
                        for part in range(5)
                        for operation in ten_operations(rl, 5 * turn + part)
                    ]
                    bits[turn] = [bits_of(each.result(PATIENCE)) for each in operations]
                    turn_ended[turn].set()
                while not turn_ended[turn].is_set():
                    rl.weights.version().result(PATIENCE)
        except BaseException as error:  # noqa: BLE001 - raised in the test's own thread below
            failures.append(error)
            for event in turn_ended:
                event.set()

    threads = [threading.Thread(target=client, args=(place,)) for place in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [bits[turn] for turn in range(TURNS)]


def run(folder: Path, program: Any, faults: list[Faults] | None) -> Ended:
    folder.mkdir()
    with served(folder) as url, three_clients(url, faults) as sessions:
        return Ended(program(sessions), end_state(sessions[0], folder / "run"))


def check(program: Any, tmp_path: Path) -> None:
    faults = [everything(seed, **dict.fromkeys(KINDS, 0.08)) for seed in SEEDS]
    faulty = run(tmp_path / "faulty", program, faults)
    for each in faults:
        assert min(each.injected[kind] for kind in KINDS) >= 1, each.injected
    assert faulty == run(tmp_path / "clean", program, None)


def test_three_clients_in_turn_change_no_bit(tmp_path: Path) -> None:
    check(alternating, tmp_path)


def test_three_clients_with_pipelines_change_no_bit(tmp_path: Path) -> None:
    check(pipelines_in_turn, tmp_path)
