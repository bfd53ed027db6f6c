"""A step of stock verl through the shim: its time, where that goes, and the bytes it sends.

    python benchmarks/verl_step.py             tables on the terminal
    python benchmarks/verl_step.py --write     and in docs/benchmarks.md

Runs in verl's environment, on the training of tests/verl: verl's own `main_ppo` in a process of its
own, and `remote-rl serve mock`, from the environment of REMOTE_RL_SERVER_PYTHON where that is set.
The bytes are those that the server counts while the shim's own functions send verl's rows.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from reference import timed
from report import publish, table
from verl_bytes import LONG, TINY, Worker, bytes_table, mock_session, rows_of
from verl_runs import Trainings, serve_mock
from verl_workload import VOCABULARY, build_inputs

from remote_rl import SamplingParams
from shims.verl.options import PATH, POLL_SECONDS

STOCK, DEFAULT = "every 2 s, as stock", f"every {POLL_SECONDS} s, the shim's default"
#: how often verl looks for finished rollouts: what is added to the tests' command line
POLLS = {
    STOCK: (f"+{PATH}.poll_seconds=2",),
    DEFAULT: (),
    "every 0.05 s": (f"+{PATH}.poll_seconds=0.05",),
}
#: the tests' training without their own replay buffer and without checkpoints
PLAIN = (
    "trainer.v1.sampler.custom_sampler.path=null",
    "trainer.v1.sampler.custom_sampler.name=null",
    "trainer.save_freq=-1",
)
#: steps at the beginning of a training that still load and connect
WARM_UP = 2
#: verl's names of a step's parts, `timing_s/...`
PARTS = ("gen", "old_log_prob", "ref", "adv", "update_actor", "update_weights")
WHOLE, REST = "step", "the rest"


def trained(folder: Path, inputs: dict[str, Path], steps: int, poll: str) -> list[dict[str, float]]:
    """Seconds of each step of one training after its first ones, by verl's names of the parts."""
    trainings = Trainings(inputs, folder)
    try:
        with serve_mock(folder / "server", vocab_size=len(VOCABULARY)) as url:
            done, rows = trainings(url, *PLAIN, *POLLS[poll], steps=steps)
    finally:
        trainings.close()
    if done.returncode or len(rows) != steps:
        raise SystemExit(f"the training {poll!r} failed:\n{done.stdout[-4000:]}")
    return [parts_of(row["data"]) for row in rows[WARM_UP:]]


def parts_of(metrics: dict[str, Any]) -> dict[str, float]:
    """Seconds of a step and of its parts, and what the parts leave."""
    taken = {name: float(metrics[f"timing_s/{name}"]) for name in (WHOLE, *PARTS)}
    return taken | {REST: taken[WHOLE] - sum(taken[name] for name in PARTS)}


def step_times(folder: Path, steps: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Steps of every kind of training, which take turns."""
    inputs = build_inputs(folder / "inputs")
    taken: dict[str, list[dict[str, float]]] = {poll: [] for poll in POLLS}
    for number in range(rounds):
        for index, poll in enumerate(POLLS):
            here = folder / f"{number}-{index}"
            here.mkdir()
            taken[poll] += trained(here, inputs, steps, poll)
    return taken


def median(steps: list[dict[str, float]], part: str = WHOLE) -> float:
    """Seconds."""
    return statistics.median(step[part] for step in steps)


def time_tables(taken: dict[str, list[dict[str, float]]], alone: dict[str, float]) -> list[str]:
    """The steps side by side, and their parts beside the shim's own calls."""
    stock = median(taken[STOCK])
    steps = [
        (
            poll,
            str(len(each)),
            f"{median(each):.3f}",
            f"{min(step[WHOLE] for step in each):.3f}",
            f"{median(each) / stock:.2f}",
        )
        for poll, each in taken.items()
    ]
    parts = [
        (
            part,
            *(f"{median(each, part) * 1e3:.0f}" for each in taken.values()),
            f"{alone[part] * 1e3:.1f}" if part in alone else "",
        )
        for part in (WHOLE, *PARTS, REST)
    ]
    head = ("verl looks for rollouts", "steps", "s, median", "s, least", "by stock's")
    names = ("ms of a step, median", *(poll.partition(",")[0] for poll in taken), "remote_rl alone")
    return [table(head, steps), table(names, parts)]


def calls_alone(rounds: int) -> dict[str, float]:
    """Seconds of what the shim does in a step of the tests' training, without verl's trainer around
    it: medians, by verl's names of the parts. The generates are in flight together."""
    worker = Worker(rows_of(TINY, np.random.default_rng(0)))
    params = SamplingParams(max_tokens=TINY.responses[1], temperature=0.9)
    with mock_session() as (_, session):

        def generate() -> None:
            sampling = session.sampling
            for operation in [sampling.generate([[2, 3]], params) for _ in range(TINY.rows)]:
                operation.result()

        calls: dict[str, Callable[[], Any]] = {
            "gen": generate,
            "old_log_prob": lambda: worker.old(session),
            "ref": lambda: worker.reference(session),
            "update_actor": lambda: worker.update(session),
            "update_weights": lambda: session.weights.sync().result(),
        }
        taken = [{name: timed(call) for name, call in calls.items()} for _ in range(rounds + 2)]
    return {name: statistics.median(each[name] for each in taken[2:]) for name in calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=15, help="of each training")
    parser.add_argument("--rounds", type=int, default=2, help="trainings of each kind")
    parser.add_argument("--write", action="store_true", help="also into docs/benchmarks.md")
    options = parser.parse_args()
    sizes = [bytes_table(shape) for shape in (LONG, TINY)]
    alone = calls_alone(rounds=50)
    with tempfile.TemporaryDirectory(prefix="rl", dir="/tmp") as folder:
        taken = step_times(Path(folder), options.steps, options.rounds)
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("verl", "torch")]
    text = [*time_tables(taken, alone), *sizes, f"With {' and '.join(versions)}, on:"]
    publish("verl", "\n\n".join(text), write=options.write)


if __name__ == "__main__":
    main()
