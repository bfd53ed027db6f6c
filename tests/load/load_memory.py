"""A client in a process of its own, which says how much memory it and its server took; run by
test_memory.py as `python load_memory.py URL PID-OF-SERVER WHAT COUNT`.

Prints what both had before and after, and at their peak in between, in bytes, as JSON.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from typing import Any

import numpy as np
import xxhash
from load_server import forget_peak, peak, resident

from remote_rl import Batch, Session, connect

MB = 1 << 20
#: several times `server.memory.QUIET_SECONDS`
MOMENT_SECONDS = 0.8


def batch_of(megabytes: int) -> Batch:
    """One whose arrays have so many bytes: 5 for each token."""
    rows = 64
    tokens = megabytes * MB // 5 // rows
    return Batch(
        prompts=[[1] * 8] * rows,
        prompt_index=np.arange(rows),
        responses=np.ones((rows, tokens), np.int32),
        temperature=1.0,
    )


def calls(rl: Session, what: str, megabytes: int) -> Any:
    """A function that sends so much, or gets about as much back."""
    if what == "push":
        weights = np.ones(megabytes * MB // 4, np.float32)
        return lambda: rl.weights.push({"w": weights}).result()
    if what.startswith("parts of"):
        return pushes_in_parts(rl, int(what.split()[-1]), megabytes)
    batch = batch_of(megabytes)
    if what == "forward":
        return lambda: rl.training.forward(batch).result()
    weights = np.ones(megabytes * MB // 4, np.float32)

    def both() -> None:
        rl.training.forward(batch).result()
        rl.weights.push({"w": weights}).result()

    return both


def pushes_in_parts(rl: Session, part: int, megabytes: int) -> Any:
    """A function that pushes so much in parts of `part` megabytes, a whole one and some more in
    each of three tensors."""
    whole = np.arange(megabytes * MB // 4, dtype=np.float32)
    cuts = np.array_split(whole, 3)

    def push() -> None:
        tensors = {f"w{number}": each for number, each in enumerate(cuts)}
        receipt = rl.weights.push(tensors, part_bytes=part * MB).result()
        assert receipt.bytes == whole.nbytes
        assert receipt.source_fingerprint == xxhash.xxh3_128_hexdigest(whole)

    return push


def main() -> None:
    url, server, what = sys.argv[1:4]
    megabytes, warm_up, count = map(int, sys.argv[4:])
    with connect(url) as rl:
        call = calls(rl, what, megabytes)
        pids = {"client": "self", "server": server}

        def now() -> dict[str, int]:
            """After a call or a few, the least: an allocator keeps a few free megabytes back, now
            more and now less, and the server gives them up a moment after the last message."""
            looks = []
            for _ in range(max(1, warm_up)):
                if warm_up:
                    call()
                settle(rl)
                until = time.monotonic() + MOMENT_SECONDS
                while not looks or time.monotonic() < until:
                    looks.append({name: resident(pid) for name, pid in pids.items()})
                    time.sleep(0.05)
            return {name: min(look[name] for look in looks) for name in pids}

        before = now()
        for pid in pids.values():
            forget_peak(pid)
        for _ in range(count):
            call()
        peaks = {name: peak(pid) for name, pid in pids.items()}
        print(json.dumps({"before": before, "peak": peaks, "after": now()}))


def settle(rl: Session) -> None:
    """Garbage is gone, and what was received is acknowledged."""
    gc.collect()
    while rl._connection._link._acknowledgements:
        time.sleep(0.05)


if __name__ == "__main__":
    main()
