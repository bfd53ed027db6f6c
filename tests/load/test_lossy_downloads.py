"""Files and samples arrive whole and once where messages are lost, cut and repeated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from load_backend import Light
from load_server import Served

from remote_rl import Batch, Operation, SamplingParams, connect, losses
from remote_rl.testing.faults import Faults

Serve = Callable[..., Served]
BATCH = Batch(prompts=[[1, 2]], prompt_index=[0], responses=[[1, 2, 3]], temperature=1.0)
MEGABYTES = 3
#: everything that can happen, often
FAULTS = {
    "lose_request": 0.1,
    "lose_response": 0.1,
    "cut_request": 0.05,
    "cut_response": 0.1,
    "duplicate": 0.1,
    "delay": 0.1,
    "reorder": 0.1,
}


def test_a_download_survives_lost_messages(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from remote_rl.client import download

    monkeypatch.setattr(download, "_CHUNK", 100_000)  # about 30 pieces
    server = serve(Light(file_bytes=MEGABYTES << 20), checkpoint_dir=tmp_path / "run")
    faults = Faults(seed=3, **FAULTS)
    with connect(server.url, wrap_transport=faults.wrap) as rl:
        rl.training.save("a").result(60)
        rl.download("checkpoint", "a", tmp_path / "here")
    written = (tmp_path / "run" / "checkpoints" / "a" / "state" / "weights").read_bytes()
    assert (tmp_path / "here" / "state" / "weights").read_bytes() == written
    assert len(written) == MEGABYTES << 20
    assert sum(faults.injected[kind] for kind in ("lose_response", "cut_response")) > 2


@pytest.mark.parametrize("seed", range(3))
def test_samples_come_once_each_where_waits_are_lost(serve: Serve, seed: int) -> None:
    """A wait's samples come again with the next one; those already held are passed over."""
    backend = Light(holds=True)
    faults = Faults(seed=seed, **FAULTS)
    with connect(serve(backend).url, wrap_transport=faults.wrap) as rl:
        operations = [
            rl.sampling.generate([[1]] * 4, SamplingParams(n=3, max_tokens=4)) for _ in range(10)
        ]
        streams = [iter(operation) for operation in operations]
        first = [[next(samples) for _ in range(2)] for samples in streams]
        backend.let_go()
        for held, samples in zip(first, streams):
            seen = Counter((each.prompt_index, each.index) for each in (*held, *samples))
            assert seen == {(prompt, index): 1 for prompt in range(4) for index in range(3)}


def test_little_room_and_lost_messages_together(serve: Serve) -> None:
    """A `Busy` that is lost, and a copy that comes in while another one waits for room."""
    backend = Light()
    faults = Faults(seed=1, **FAULTS)
    server = serve(backend, budget_bytes=1)
    with connect(server.url, wrap_transport=faults.wrap) as rl:
        operations: list[Operation[Any]] = []
        for step in range(15):
            operations.append(rl.sampling.generate([[1]], SamplingParams(max_tokens=4)))
            loss = losses.CrossEntropy(scale=step)
            operations.append(rl.training.forward_backward(BATCH, loss))
        for operation in operations:
            operation.result(120)
    assert backend.log == [("forward_backward", step) for step in range(15)]
    assert server.answers["Submit", "Busy"] > 0
