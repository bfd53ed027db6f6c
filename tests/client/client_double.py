"""A backend without an engine, for what the mock can't show: the order of calls, failures on
command, and operations that last until a test lets them go."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np

from remote_rl import Operation
from remote_rl.losses import LOSSES
from remote_rl.protocol import Capabilities, ModelInfo, TokenizerFiles
from remote_rl.types import (
    ForwardBackwardResult,
    Generation,
    OptimStepResult,
    Outputs,
    Sample,
    SyncReceipt,
)

EVERYTHING = Capabilities(
    operations={
        *("forward", "forward_backward", "optim_step", "zero_grad", "snapshot", "save", "load"),
        *("restore_snapshot", "drop_snapshot", "set_reference", "export"),
        *(
            "sync",
            "push_part",
            "push",
            "generate",
            "pause",
            "resume",
            "reset_prefix_cache",
            "finish_session",
        ),
        "tokenizer",
    },
    outputs=frozenset({"logprobs", "entropy"}),
    losses=frozenset(each.__name__ for each in LOSSES.values()),
    optimizers=frozenset({"AdamW"}),
    sampling_options=frozenset({"temperature", "seed", "stop_token_ids", "priority"}),
    sampling_outputs=frozenset({"logprobs"}),
    in_flight=frozenset({"keep", "wait", "abort"}),
    push_dtypes=frozenset({"float32"}),
    policies=frozenset({"reference", "snapshot"}),
)


class Hold:
    """Something that a backend method waits for; `reached` tells the test that one waits."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._opened = False
        self._lock = threading.Lock()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def open(self) -> None:
        """Lets all who wait go on, and everybody who comes later."""
        with self._lock:
            self._opened = True
            waiting, self._waiting = self._waiting, []
        for loop, event in waiting:
            loop.call_soon_threadsafe(event.set)

    async def wait(self) -> None:
        """Waits on the running loop."""
        with self._lock:
            if self._opened:
                self.reached.set()
                return
            event = asyncio.Event()
            waiter = (asyncio.get_running_loop(), event)
            self._waiting.append(waiter)
        self.reached.set()
        try:
            await event.wait()
        finally:
            with self._lock:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)


class Double:
    """One object for all faces.

    log: (operation, tag) as they start. holds: operation -> Hold that each of its calls passes.
    faults: (operation, which call from 1) -> what it raises. sample_holds: for generate, sample
    index -> Hold before it finishes. A call's tag: a loss's scale, a name, or None.
    """

    name = "double"
    seed = 0
    model = ModelInfo(name="double", vocab_size=10, eos_token_ids=(0,))
    capabilities = EVERYTHING

    def __init__(self, capabilities: Capabilities = EVERYTHING) -> None:
        self.training = self.sampling = self.weights = self
        self.capabilities = capabilities
        self.log: list[tuple[str, Any]] = []
        self.holds: dict[str, Hold] = {}
        self.faults: dict[tuple[str, int], Exception] = {}
        self.sample_holds: dict[int, Hold] = {}
        self.requests: list[Any] = []
        self.closed = False
        self._counts: dict[str, int] = {}
        self._trainer = self._sampler = 0

    def hold(self, operation: str) -> Hold:
        """Every call of this operation waits from now on, until the Hold is opened."""
        return self.holds.setdefault(operation, Hold())

    def names(self) -> list[str]:
        """The operations that started, in order."""
        return [name for name, _ in self.log]

    async def _enter(self, name: str, request: Any, tag: Any = None) -> None:
        self.log.append((name, tag))
        self.requests.append(request)
        call = self._counts[name] = self._counts.get(name, 0) + 1
        if name in self.holds:
            await self.holds[name].wait()
        if (name, call) in self.faults:
            raise self.faults[name, call]

    async def start(self, context: Any) -> None:
        context.progress(0, 1, "starting")

    async def close(self) -> None:
        self.closed = True

    def kill(self) -> None:
        self.closed = True

    def sampler_version(self) -> tuple[int, None]:
        return self._sampler, None

    async def tokenizer(self, request: Any, context: Any) -> TokenizerFiles:
        return TokenizerFiles(kind="bytes")

    # -- training -----------------------------------------------------------------------------

    async def forward(self, request: Any, context: Any) -> Outputs:
        await self._enter("forward", request, request.policy)
        responses = request.batch.responses
        zeros = responses.with_values(np.zeros(len(responses.values), np.float32))
        return Outputs(values=dict.fromkeys(request.outputs, zeros), version=self._trainer)

    async def forward_backward(self, request: Any, context: Any) -> ForwardBackwardResult:
        tag = getattr(request.loss, "scale", "cotangents")
        context.progress(1, 2, "computing")
        await self._enter("forward_backward", request, tag)
        value = tag if isinstance(tag, (int, float)) else 0.0
        return ForwardBackwardResult(value=value, version=self._trainer)

    async def optim_step(self, request: Any, context: Any) -> OptimStepResult:
        await self._enter("optim_step", request, request.optimizer.lr)
        self._trainer = context.next_version
        return OptimStepResult(grad_norm=1.0, skipped=False, version=self._trainer)

    async def zero_grad(self, request: Any, context: Any) -> None:
        await self._enter("zero_grad", request)

    async def snapshot(self, request: Any, context: Any) -> None:
        await self._enter("snapshot", request, request.name)

    async def restore_snapshot(self, request: Any, context: Any) -> None:
        await self._enter("restore_snapshot", request, request.name)
        self._trainer = context.next_version

    async def drop_snapshot(self, request: Any, context: Any) -> None:
        await self._enter("drop_snapshot", request, request.name)

    async def set_reference(self, request: Any, context: Any) -> None:
        await self._enter("set_reference", request, request.source)

    async def export(self, request: Any, context: Any) -> None:
        await self._enter("export", request, request.name)
        (context.directory / "weights").write_text(str(self._trainer))

    async def save(self, request: Any, context: Any) -> bool:
        await self._enter("save", request, request.name)
        (context.directory / "weights").write_text(str(self._trainer))
        return False

    async def load(self, request: Any, context: Any) -> None:
        await self._enter("load", request, request.name)
        self._trainer = context.next_version

    async def sync(self, request: Any, context: Any) -> SyncReceipt:
        await self._enter("sync", request, request.label)
        self._sampler = self._trainer
        return self._receipt(request.label)

    async def push_part(self, request: Any, context: Any) -> None:
        """A hold is for those that carry pieces."""
        if request.forms:
            self.log.append(("push_part", "forms"))
            self.requests.append(request)
        else:
            await self._enter("push_part", request, "pieces")

    async def push(self, request: Any, context: Any) -> SyncReceipt:
        await self._enter("push", request, request.label)
        self._sampler = context.next_version
        return self._receipt(request.label)

    def _receipt(self, label: Any) -> SyncReceipt:
        return SyncReceipt(
            version=self._sampler,
            label=label,
            tensors=1,
            bytes=4,
            seconds=0.0,
            source_fingerprint="same",
            sampler_fingerprint="same",
        )

    # -- sampling -----------------------------------------------------------------------------

    async def generate(self, request: Any, context: Any) -> Generation:
        await self._enter("generate", request, request.params.priority)
        samples: list[Sample] = []

        async def finish(prompt: int, index: int) -> None:
            hold = self.sample_holds.get(index)
            if hold is not None:
                waits = {
                    asyncio.ensure_future(hold.wait()),
                    asyncio.ensure_future(context.abort_signal.wait()),
                }
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for wait in waits:
                        wait.cancel()
            sample = Sample(
                tokens=[1, 2][: request.params.max_tokens],
                logprobs=[-0.5, -0.25][: request.params.max_tokens],
                finish_reason="abort" if context.cancelled else "stop",
                first_version=self._sampler,
                last_version=self._sampler,
                prompt_index=prompt,
                index=index,
            )
            samples.append(sample)
            context.emit(sample)

        await asyncio.gather(
            *(
                finish(prompt, index)
                for prompt in range(len(request.prompts))
                for index in range(request.params.n)
            )
        )
        return Generation.from_samples(
            sorted(samples, key=lambda each: (each.prompt_index, each.index))
        )

    async def pause(self, request: Any, context: Any) -> None:
        await self._enter("pause", request)

    async def resume(self, request: Any, context: Any) -> None:
        await self._enter("resume", request)

    async def reset_prefix_cache(self, request: Any, context: Any) -> None:
        await self._enter("reset_prefix_cache", request)

    async def finish_session(self, request: Any, context: Any) -> None:
        await self._enter("finish_session", request, request.session_id)


def ended(operation: Operation[Any]) -> None:
    """Waits for the end of an operation without looking at its outcome."""
    operation._call.ending.wait(60)
    assert operation.done()
