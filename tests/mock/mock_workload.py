"""What the mock's tests share: a stand-in for the dispatcher, and small batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np

from backends.mock import create
from backends.mock.backend import MockBackend
from remote_rl.ops import OPERATIONS
from remote_rl.types import Batch, Generation, Ragged, Sample, SamplingParams

SMALL: dict[str, Any] = {
    "vocab_size": 13,
    "window": 3,
    "embedding_size": 4,
    "hidden_size": 6,
    "initial_scale": 1.0,
    "eos_token_ids": (12,),
}


class FakeContext:
    """An OperationContext that belongs to one operation."""

    def __init__(
        self,
        request_id: str = "client:training:1",
        version: int = 0,
        next_version: int = 1,
        seed: int = 7,
        directory: Path | None = None,
    ) -> None:
        self.request_id = request_id
        self.version = version
        self.next_version = next_version
        self.seed = seed
        self._directory = directory
        self.abort_signal = asyncio.Event()
        self.emitted: list[Sample] = []
        self.signs: list[tuple[float, float | None, str]] = []
        self.slept: list[float] = []

    @property
    def directory(self) -> Path:
        assert self._directory is not None
        return self._directory

    @property
    def cancelled(self) -> bool:
        return self.abort_signal.is_set()

    def progress(self, done: float, total: float | None = None, what: str = "") -> None:
        self.signs.append((done, total, what))

    def emit(self, sample: Sample) -> None:
        self.emitted.append(sample)

    async def thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.to_thread(function, *arguments)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(seconds)


class Run:
    """A started backend and the counters that a dispatcher keeps."""

    def __init__(self, **options: Any) -> None:
        self.backend: MockBackend = create(**(SMALL | options))
        self.version = self.highest = 0
        self.count = 0

    async def start(self) -> Run:
        await self.backend.start(FakeContext("dispatcher:query:0"))
        return self

    def context(self, **values: Any) -> FakeContext:
        self.count += 1
        given = {
            "request_id": f"client:any:{self.count}",
            "version": self.version,
            "next_version": self.highest + 1,
        }
        return FakeContext(**(given | values))

    async def do(
        self, operation: str, /, *, context: FakeContext | None = None, **fields: Any
    ) -> Any:
        """Runs one operation to its end."""
        row = OPERATIONS[operation]
        context = context or self.context()
        request = row.request(**fields)
        face: Any = self.backend if row.face == "backend" else getattr(self.backend, row.face)
        result = await getattr(face, operation)(request, context)
        if operation in ("restore_snapshot", "load", "reset"):
            self.version = self.highest = context.next_version
        elif operation == "push":
            self.highest = result.version
        elif operation == "optim_step":
            self.version = result.version
            self.highest = max(self.highest, self.version)
        return result

    async def generate(
        self, prompts: Any, context: FakeContext | None = None, **params: Any
    ) -> Any:
        context = context or self.context()
        if params.get("seed") is not None:  # as the dispatcher does
            context.seed = params["seed"]
        result: Generation = await self.do(
            "generate", context=context, prompts=prompts, params=SamplingParams(**params)
        )
        return list(result.samples())

    def begin(self, prompts: Any, **params: Any) -> tuple[asyncio.Task[list[Sample]], FakeContext]:
        """A generate in flight."""
        context = self.context()
        return asyncio.create_task(self.generate(prompts, context, **params)), context


def running(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A coroutine as a test."""

    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 60))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def until(condition: Callable[[], bool]) -> None:
    """Until it holds; the test's own limit ends what never does."""
    while not condition():
        await asyncio.sleep(0.001)


def example_batch(vocab_size: int = 13, rows: int = 6, seed: int = 0, **changes: Any) -> Batch:
    """A batch with every field, shared prompts, an empty response and a row without counted
    tokens."""
    random = np.random.default_rng(seed)
    lengths = [int(random.integers(1, 6)) for _ in range(rows)]
    lengths[1] = 0
    responses = Ragged.from_rows(
        [random.integers(0, vocab_size, length) for length in lengths], np.int32
    )
    total = len(responses.values)
    mask = (random.random(total) < 0.8).astype(np.uint8)
    mask[responses.offsets[3] : responses.offsets[4]] = 0

    def floats(scale: float, shift: float = 0.0) -> Ragged:
        drawn = random.standard_normal(total) * scale + shift
        return responses.with_values(drawn.astype(np.float32))

    fields: dict[str, Any] = {
        "prompts": [random.integers(0, vocab_size, size) for size in (1, 2, 5)],
        "prompt_index": np.arange(rows) % 3,
        "responses": responses,
        "temperature": random.uniform(0.5, 1.5, rows).astype(np.float32),
        "mask": responses.with_values(mask),
        "advantages": floats(1.0),
        "old_logprobs": floats(0.3, -2.5),
        "ref_logprobs": floats(0.3, -2.5),
        "importance_weights": responses.with_values(
            random.uniform(0.5, 1.5, total).astype(np.float32)
        ),
    }
    return Batch(**(fields | changes))
