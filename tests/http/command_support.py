"""`remote-rl` in a process of its own, and a short training run for it."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from remote_rl import AdamW, Batch, SamplingParams, connect, losses

LINE = re.compile(r'remote_rl: serving mock at (https?://\S+:\d+) - connect\("\1"\)\n')
PATIENCE = 60


def remote_rl(*arguments: str, timeout: float = PATIENCE) -> subprocess.CompletedProcess[str]:
    """A whole run of the command."""
    return subprocess.run(
        [sys.executable, "-m", "remote_rl", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The command, killed at the end if it still runs."""
    with subprocess.Popen(
        [sys.executable, "-m", "remote_rl", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(stream: Any) -> str:
    """The next line, within patience; nothing where there is none any more. Byte by byte, so that
    no line waits in a buffer that `select` can't see."""
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([stream], [], [], PATIENCE)
        assert ready, f"no line came after {line!r}"
        byte = os.read(stream.fileno(), 1)
        if not byte:
            break
        line += byte
    return line.decode()


def line_with(stream: Any, text: str) -> str:
    """The next line that holds `text`."""
    while text not in (line := line_of(stream)):
        assert line, f"it ended without a line with {text!r}"
    return line


def address(process: subprocess.Popen[str]) -> str:
    """Where the server says it is."""
    line = line_of(process.stdout)
    match = LINE.fullmatch(line)
    assert match, line or process.communicate()[1]
    return match[1]


def stop(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> tuple[int, str, str]:
    """Exit code and what else it printed, after a signal."""
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


def trained(target: str, **options: int) -> list[bytes]:
    """Everything a short run gives back, as bits."""
    given: list[bytes] = []
    with connect(target, **options) as session:
        for step in range(3):
            groups = session.sampling.generate(
                [[1, 2, 3], [4]], SamplingParams(n=3, max_tokens=6)
            ).result()
            batch = Batch.from_groups(groups, advantages=[1.0, 0.5, -1.5] * 2)
            forward = session.training.forward(batch, outputs={"logprobs", "entropy"})
            backward = session.training.forward_backward(batch, losses.PPO())
            stepped = session.training.optim_step(AdamW(lr=1e-2)).result()
            receipt = session.weights.sync(label=step).result()
            outputs = forward.result()
            given += [batch.responses.values.tobytes(), outputs.logprobs.values.tobytes()]
            given += [outputs.entropy.values.tobytes(), np.float64(stepped.grad_norm).tobytes()]
            given += [np.float64(backward.result().value).tobytes(), str(receipt.version).encode()]
    return given
