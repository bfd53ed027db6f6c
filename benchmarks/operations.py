"""Small operations: what one costs over HTTP and in process, many at once, and a short run.

python benchmarks/operations.py             tables on the terminal
python benchmarks/operations.py --write     and in docs/benchmarks.md
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from reference import Bare, serving, small_submit, timed
from report import publish, table

from remote_rl import SamplingParams, Session, connect
from remote_rl.wire import encode

TURN = 25
IN_FLIGHT = 2000
#: 20 steps of examples/grpo.py on what is left of it: 8 prompts, 4 responses of 4 tokens each
TWENTY_STEPS = """
import time
began = time.perf_counter()
import numpy as np
from remote_rl import AdamW, Batch, SamplingParams, connect, losses
imported = time.perf_counter()
with connect("mock") as rl:
    prompts = [[10 + number, 3] for number in range(8)]
    params = SamplingParams(n=4, max_tokens=4)
    for step in range(20):
        groups = rl.sampling.generate(prompts, params).result()
        rewards = np.array([[float(s.tokens[0] % 2) for s in group] for group in groups])
        advantages = rewards - rewards.mean(axis=1, keepdims=True)
        batch = Batch.from_groups(groups, advantages=advantages)
        rl.training.forward_backward(batch, losses.PPO())
        rl.training.optim_step(AdamW(lr=0.01)).result()
        rl.weights.sync(label=step).result()
print(imported - began, time.perf_counter() - began)
"""


def latencies(url: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of each kind of small call, in turns of 25."""
    with connect(url) as remote, connect("mock") as local:
        bare = Bare(url)
        body = bytes(encode(small_submit()).nbytes)
        kinds: dict[str, Callable[[], Any]] = {
            "bare request, from a blocking caller": lambda: bare.post(
                "/reference/echo", body, len(body)
            ),
            "zero_grad over HTTP": lambda: remote.training.zero_grad().result(),
            "version over HTTP": lambda: remote.weights.version().result(),
            "zero_grad in process": lambda: local.training.zero_grad().result(),
            "version in process": lambda: local.weights.version().result(),
        }
        on_loop = "bare request, on the client's own loop"
        taken: dict[str, list[float]] = {on_loop: []} | {name: [] for name in kinds}
        for number in range(-2, rounds):
            turn = {name: [timed(call) for _ in range(TURN)] for name, call in kinds.items()}
            turn[on_loop] = bare.repeat_post("/reference/echo", body, TURN)
            if number >= 0:
                for name, seconds in turn.items():
                    taken[name] += seconds
        bare.close()
    return taken


def generates_in_flight(session: Session) -> float:
    """Seconds of 2,000 one-token generates, all submitted before the first is waited for."""
    params = SamplingParams(max_tokens=1)

    def together() -> None:
        operations = [session.sampling.generate([[1, 2, 3]], params) for _ in range(IN_FLIGHT)]
        for operation in operations:
            assert len(operation.result()) == 1

    return timed(together)


def twenty_steps() -> tuple[float, float]:
    """Seconds of the import and of everything, in a fresh interpreter, from another folder."""
    done = subprocess.run(
        [sys.executable, "-c", TWENTY_STEPS],
        check=True,
        capture_output=True,
        text=True,
        cwd=tempfile.gettempdir(),
    )
    imported, everything = map(float, done.stdout.split())
    return imported, everything


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--write", action="store_true", help="also into docs/benchmarks.md")
    options = parser.parse_args()
    with serving() as (url, _):
        taken = latencies(url, options.rounds)
        with connect(url) as remote:
            over_http = statistics.median(generates_in_flight(remote) for _ in range(5))
    with connect("mock") as local:
        in_process = statistics.median(generates_in_flight(local) for _ in range(5))
    base = statistics.median(taken["bare request, from a blocking caller"])
    rows = []
    for name, seconds in taken.items():
        median = statistics.median(seconds)
        low = statistics.quantiles(seconds, n=10)[0]
        rows.append((name, f"{median * 1e6:.0f}", f"{low * 1e6:.0f}", f"{median / base:.2f}"))
    runs = [twenty_steps() for _ in range(9)]
    imported, everything = (statistics.median(column) for column in zip(*runs))
    text = "\n\n".join(
        [
            table(("one small call", "us, median", "us, p10", "by the bare request"), rows),
            table(
                ("2,000 generates in flight", "seconds", "operations a second"),
                [
                    ("over HTTP, an idle backend", f"{over_http:.2f}", f"{2000 / over_http:.0f}"),
                    ("in process, the mock", f"{in_process:.2f}", f"{2000 / in_process:.0f}"),
                ],
            ),
            table(
                ("20 GRPO steps on the mock, a fresh interpreter", "seconds, median of 9"),
                [
                    ("import", f"{imported:.2f}"),
                    ("import and 20 steps", f"{everything:.2f}"),
                ],
            ),
        ]
    )
    publish("operations", text, write=options.write)


if __name__ == "__main__":
    main()
