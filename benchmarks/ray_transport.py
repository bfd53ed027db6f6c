"""Over Ray: a small operation and a batch beside bare calls of an actor.

    python benchmarks/ray_transport.py             tables on the terminal
    python benchmarks/ray_transport.py --write     and in docs/benchmarks.md

The bare actor is made as remote_rl's is and returns what it is given. The cluster is its own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle
import secrets
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from reference import alternating, paired_ratio, small_submit, timed
from report import publish, table
from served import IdleBackend

from remote_rl import Batch, Session, connect, losses
from remote_rl.client.loop import LoopThread
from remote_rl.dispatcher import Dispatcher
from remote_rl.server.ray_actor import ServedRun
from remote_rl.server.ray_server import usual_options
from remote_rl.transports.ray_cluster import NAMESPACE
from remote_rl.wire import encode

TURN = 10
ROWS, LENGTH, VOCABULARY = 512, 4096, 100_000
SENT = ("mask", "advantages", "old_logprobs", "ref_logprobs")


class Bare:
    """An actor without remote_rl."""

    async def echo(self, data: Any) -> Any:
        """What it is given."""
        return data

    async def take(self, data: Any) -> int:
        """Its arrays, of which nothing is looked at."""
        return len(data)


class IdleRun(ServedRun):
    """A run whose backend does nothing."""

    async def start_idle(self) -> None:
        """Instead of `start`."""
        dispatcher = Dispatcher(IdleBackend())  # type: ignore[arg-type] - as in served.py
        await dispatcher.start()
        self._dispatcher = dispatcher


@contextlib.contextmanager
def cluster() -> Iterator[Any]:
    """`ray`, in a cluster with a token and a temporary folder of its own."""
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    import ray  # which reads these

    folder = tempfile.mkdtemp(prefix="rr", dir="/tmp")
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=2 << 30,
        log_to_driver=False,
        _temp_dir=folder,
    )
    try:
        yield ray
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def small(ray: Any, session: Session, bare: Any, rounds: int) -> str:
    """One table: each kind of small call, in turns of 10."""
    body, thread = bytes(encode(small_submit()).nbytes), LoopThread()

    async def on_loop() -> None:
        await bare.echo.remote(body)

    kinds: dict[str, Callable[[], Any]] = {
        "bare call, awaited on a loop's thread as remote_rl does": lambda: thread.run(on_loop()),
        "bare call, ray.get": lambda: ray.get(bare.echo.remote(body)),
        "zero_grad over Ray": lambda: session.training.zero_grad().result(),
        "version over Ray": lambda: session.weights.version().result(),
    }
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(-2, rounds):
        first = number % len(kinds)
        for name in [*kinds, *kinds][first : first + len(kinds)]:
            seconds = [timed(kinds[name]) for _ in range(TURN)]
            if number >= 0:
                taken[name] += seconds
    thread.stop()
    awaited, gotten, *_ = (statistics.median(seconds) for seconds in taken.values())
    rows = []
    for name, seconds in taken.items():
        median = statistics.median(seconds)
        low = statistics.quantiles(seconds, n=10)[0]
        ratios = (f"{median / awaited:.2f}", f"{median / gotten:.2f}")
        rows.append((name, f"{median * 1e6:.0f}", f"{low * 1e6:.0f}", *ratios))
    head = ("one small call", "us, median", "us, p10", "by the awaited call", "by ray.get")
    return table(head, rows)


def batch_of(random: np.random.Generator) -> Batch:
    """512 responses of 4,096 tokens to as many prompts, with what PPO with a KL term needs."""

    def floats() -> Any:
        return random.normal(size=(ROWS, LENGTH)).astype(np.float32)

    return Batch(
        prompts=random.integers(0, VOCABULARY, (ROWS, 256), np.int32),
        prompt_index=np.arange(ROWS),
        responses=random.integers(0, VOCABULARY, (ROWS, LENGTH), np.int32),
        temperature=1.0,
        advantages=floats(),
        old_logprobs=floats(),
        ref_logprobs=floats(),
    )


def large(ray: Any, session: Session, bare: Any, rounds: int) -> str:
    """One table: a batch beside the same bytes, as arrays of a bare call."""
    batch = batch_of(np.random.default_rng(0))
    frame = encode(batch.only(SENT))
    loss = losses.PPO(kl=losses.KL(coef=0.1))

    def fresh() -> list[Any]:
        return [pickle.PickleBuffer(bytes(each)) for each in frame.buffers]

    def bare_call() -> Callable[[], Any]:
        data = fresh()
        return lambda: ray.get(bare.take.remote(data))

    def over_ray() -> Callable[[], Any]:
        copied = batch.replace(
            **{
                name: getattr(batch, name).with_values(getattr(batch, name).values.copy())
                for name in ("prompts", "responses", *SENT)
            }
        )

        def measured() -> None:
            result = session.training.forward_backward(copied, loss).result()
            assert result.value == batch.tokens

        return measured

    taken = alternating({"forward_backward over Ray": over_ray, "bare call": bare_call}, rounds)
    own = taken["forward_backward over Ray"]
    rows = [
        (
            name,
            f"{frame.nbytes / 1e6:.1f}",
            f"{statistics.median(seconds) * 1e3:.2f}",
            f"{min(seconds) * 1e3:.2f}",
            f"{paired_ratio(seconds, own):.2f}",
        )
        for name, seconds in taken.items()
    ]
    return table(("one batch", "MB", "ms, median", "ms, least", "time / remote_rl's"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--write", action="store_true", help="also into docs/benchmarks.md")
    options = parser.parse_args()
    with cluster() as ray:
        usual = usual_options(ray)
        bare = ray.remote(Bare).options(**usual).remote()
        run = ray.remote(IdleRun).options(**usual, name="idle", namespace=NAMESPACE).remote(1 << 30)
        ray.get(run.start_idle.remote())
        with connect("ray:idle") as session:
            parts = [small(ray, session, bare, options.rounds)]
            parts.append(large(ray, session, bare, options.rounds))
    publish("ray", "\n\n".join(parts), write=options.write)


if __name__ == "__main__":
    main()
