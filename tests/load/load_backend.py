"""A backend that answers at once, with as many bytes as it was asked for, and holds generates until
it is told to let them go."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import attrs
import numpy as np
import xxhash

from remote_rl.losses import LOSSES
from remote_rl.protocol import Capabilities, ModelInfo
from remote_rl.types import (
    ForwardBackwardResult,
    Generation,
    OptimStepResult,
    Outputs,
    Sample,
    SyncReceipt,
)

_RECEIPT: dict[str, Any] = {
    "tensors": 1,
    "bytes": 1,
    "seconds": 0.0,
    "source_fingerprint": "same",
    "sampler_fingerprint": "same",
}


class Light:
    """One object for all faces.

    log: the training operations in the order they ran, each with its loss's scale where it has one.
    tokens: of each sample. held: how many generates wait for `let_go` now; `most_held` at once.
    """

    name = "light"
    seed = 0
    model = ModelInfo(name="light", vocab_size=1000)
    capabilities: Any = Capabilities(
        operations=frozenset(
            (
                *("forward", "forward_backward", "optim_step", "zero_grad", "sync", "push"),
                *("generate", "pause", "resume", "save", "load", "export"),
            )
        ),
        outputs=frozenset({"logprobs", "entropy"}),
        losses=frozenset(each.__name__ for each in LOSSES.values()),
        optimizers=frozenset({"AdamW"}),
        sampling_options=frozenset({"temperature", "seed", "priority"}),
        sampling_outputs=frozenset({"logprobs"}),
        in_flight=frozenset({"keep"}),
        push_dtypes=frozenset({"float32", "uint8"}),
    )

    def __init__(self, *, tokens: int = 4, holds: bool = False, file_bytes: int = 0) -> None:
        self.training = self.sampling = self.weights = self
        self.log: list[tuple[str, Any]] = []
        self.tokens = tokens
        self.file_bytes = file_bytes
        self.held = self.most_held = 0
        self._released = threading.Event()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        if not holds:
            self._released.set()

    def let_go(self) -> None:
        """Ends the generates that are held, and holds no more."""
        self._released.set()
        for loop, event in self._waiting:
            loop.call_soon_threadsafe(event.set)

    async def start(self, context: Any) -> None: ...
    async def close(self) -> None: ...
    def kill(self) -> None: ...
    def sampler_version(self) -> tuple[int, None]:
        return 0, None

    async def forward(self, request: Any, context: Any) -> Outputs:
        self.log.append(("forward", None))
        responses = request.batch.responses
        zeros = responses.with_values(np.zeros(len(responses.values), np.float32))
        return Outputs(values=dict.fromkeys(request.outputs, zeros), version=context.version)

    async def forward_backward(self, request: Any, context: Any) -> ForwardBackwardResult:
        self.log.append(("forward_backward", getattr(request.loss, "scale", "cotangents")))
        return ForwardBackwardResult(value=0.0, version=context.version)

    async def optim_step(self, request: Any, context: Any) -> OptimStepResult:
        self.log.append(("optim_step", request.optimizer.lr))
        return OptimStepResult(grad_norm=1.0, skipped=False, version=context.next_version)

    async def zero_grad(self, request: Any, context: Any) -> None:
        self.log.append(("zero_grad", None))

    async def save(self, request: Any, context: Any) -> bool:
        (context.directory / "weights").write_bytes(bytes(range(256)) * (self.file_bytes // 256))
        return False

    export = save

    async def load(self, request: Any, context: Any) -> None: ...

    async def sync(self, request: Any, context: Any) -> SyncReceipt:
        self.log.append(("sync", request.label))
        return SyncReceipt(version=context.version, label=request.label, **_RECEIPT)

    async def push(self, request: Any, context: Any) -> SyncReceipt:
        self.log.append(("push", request.label))
        return SyncReceipt(version=context.next_version, label=request.label, **_RECEIPT)

    async def pause(self, request: Any, context: Any) -> None: ...
    async def resume(self, request: Any, context: Any) -> None: ...

    async def generate(self, request: Any, context: Any) -> Generation:
        samples = []
        for prompt in range(len(request.prompts)):
            for index in range(request.params.n):
                if index == request.params.n - 1:  # the last one waits
                    await self._wait(context)
                samples.append(self._sample(prompt, index, context))
                context.emit(samples[-1])
        return Generation.from_samples(samples)

    async def _wait(self, context: Any) -> None:
        if self._released.is_set():
            return
        event = asyncio.Event()
        self._waiting.append((asyncio.get_running_loop(), event))
        self.held += 1
        self.most_held = max(self.most_held, self.held)
        ends = [asyncio.ensure_future(each.wait()) for each in (event, context.abort_signal)]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.held -= 1
            for each in ends:
                each.cancel()

    def _sample(self, prompt: int, index: int, context: Any) -> Sample:
        return Sample(
            tokens=np.ones(self.tokens, np.int32),
            logprobs=np.zeros(self.tokens, np.float32),
            finish_reason="abort" if context.cancelled else "stop",
            first_version=0,
            last_version=0,
            prompt_index=prompt,
            index=index,
        )


class Staging(Light):
    """Takes pushes in parts, too, and writes each to memory that is not its own, as an engine's is
    not its server's. A receipt's fingerprint is a digest of all bytes in their order."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        declared = self.capabilities
        self.capabilities = attrs.evolve(declared, operations=declared.operations | {"push_part"})
        self._memory = os.memfd_create("staged")
        self._digest = xxhash.xxh3_128()

    async def close(self) -> None:
        os.close(self._memory)

    async def push_part(self, request: Any, context: Any) -> None:
        for piece in request.pieces.values():
            await context.thread(self._write, piece.data)

    def _write(self, data: Any) -> None:
        assert os.write(self._memory, data) == data.nbytes
        self._digest.update(data)

    async def push(self, request: Any, context: Any) -> SyncReceipt:
        for tensor in (request.tensors or {}).values():
            await context.thread(self._write, tensor.data)
        digest = self._digest.hexdigest()
        receipt = {**_RECEIPT, "source_fingerprint": digest, "sampler_fingerprint": digest}
        receipt["bytes"] = os.lseek(self._memory, 0, os.SEEK_CUR)
        os.lseek(self._memory, 0, os.SEEK_SET)
        self._digest.reset()
        return SyncReceipt(version=context.next_version, label=request.label, **receipt)
