"""Contract: what a backend implements (imports types, requests and errors).

A backend is an object with three faces. Each operation of the table in `ops.py` that a face lists
is a coroutine method of the same name, called with the request and an `OperationContext`:

    async def optim_step(self, request: OptimStep, context: OperationContext) -> OptimStepResult

All methods run on the dispatcher's event loop and must not block it: heavy work goes through
`context.thread(function, *arguments)`. The dispatcher has already done what is the same for every
backend: order, exactly-once, leases, deadlines, dirty and empty accumulators, names of snapshots
and files, directories, version numbers. What is left is the engine. docs/writing-a-backend.md walks
through one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol, TypeVar, get_args, runtime_checkable

import attrs
import numpy as np

from . import requests
from .errors import InvalidRequestError, UnsupportedError
from .requests import InFlight, Request
from .types import Generation, Outputs, Ragged, Sample, SyncReceipt, results
from .types.arrays import Array
from .types.fields import (
    as_names,
    as_tuple,
    each,
    integer,
    one_of,
    optional,
    plain,
    strict,
    text,
)
from .types.ragged import highest_id, highest_id_seen
from .types.results import TENSOR_DTYPES
from .types.results import TokenizerFiles as TokenizerFiles  # part of what a backend answers
from .types.sampling import SAMPLING_OUTPUTS, SamplingParams, check_ends

T = TypeVar("T")

#: the versions of the wire protocol that this package speaks, newest last
PROTOCOL_VERSIONS = (1,)


def _names(among: Collection[str] | None = None) -> Any:
    names = each(text() if among is None else one_of(among))
    return attrs.field(default=frozenset(), converter=as_names, validator=names)


_OPTIONS = tuple(field.name for field in attrs.fields(SamplingParams) if field.name != "outputs")


@strict
@attrs.frozen(kw_only=True)
class Capabilities:
    """What a backend offers, by name; what isn't listed is refused on the client.

    operations: names of `ops.OPERATIONS`. outputs: of forward and losses. losses: class names of
    `remote_rl.losses`. optimizers: class names. sampling_options: fields of SamplingParams that
    may differ from their default (n and max_tokens always may). sampling_outputs: of
    SamplingParams.outputs. in_flight: of sync and push. push_dtypes: tags of TENSOR_DTYPES.
    policies: "reference" and "snapshot", for a forward of other weights than the current ones and
    for set_reference. A name that doesn't exist is refused, here or, for operations, losses and
    optimizers, by the dispatcher as it is made; outputs may have any.
    """

    operations: frozenset[str] = _names()
    outputs: frozenset[str] = _names()
    losses: frozenset[str] = _names()
    optimizers: frozenset[str] = _names()
    sampling_options: frozenset[str] = _names(_OPTIONS)
    sampling_outputs: frozenset[str] = _names(SAMPLING_OUTPUTS)
    in_flight: frozenset[str] = _names(get_args(InFlight))
    push_dtypes: frozenset[str] = _names(TENSOR_DTYPES)
    policies: frozenset[str] = _names(("reference", "snapshot"))

    def check(self, operation: str, request: Request, backend: str) -> None:
        """Raises `UnsupportedError`, by the option's name, where something isn't declared."""
        if operation not in self.operations:
            raise UnsupportedError(
                f"backend {backend!r} does not offer the operation {operation!r}; it offers "
                f"{', '.join(sorted(self.operations)) or 'none'}",
                operation=operation,
            )
        for kind, name in request.requirements():
            offered: frozenset[str] = getattr(self, _FIELD_OF_KIND[kind])
            if name not in offered:
                what = kind.replace("_", " ")
                raise UnsupportedError(
                    f"backend {backend!r} does not offer the {what} {name!r} that {operation} "
                    f"asks for; it offers {', '.join(sorted(offered)) or 'none'}",
                    operation=operation,
                    option=name,
                )


_FIELD_OF_KIND = {
    "operation": "operations",
    "output": "outputs",
    "loss": "losses",
    "optimizer": "optimizers",
    "sampling_option": "sampling_options",
    "sampling_output": "sampling_outputs",
    "in_flight": "in_flight",
    "push_dtype": "push_dtypes",
    "policy": "policies",
}


def _count() -> Any:
    return attrs.field(default=None, converter=plain, validator=optional(integer(minimum=1)))


@strict
@attrs.frozen(kw_only=True)
class ModelInfo:
    """The model of a run. name: what `connect(model=...)` is compared with. vocab_size: ids lie
    below it. eos_token_ids: end a response. context_length: prompt plus response, None is
    unlimited. parameters: how many numbers it has."""

    name: str = attrs.field(validator=text())
    vocab_size: int = attrs.field(converter=plain, validator=integer(minimum=1))
    eos_token_ids: tuple[int, ...] = attrs.field(
        default=(), converter=as_tuple, validator=each(integer(minimum=0))
    )
    context_length: int | None = _count()
    parameters: int | None = _count()

    def check(self, request: Request, *, again: bool = True) -> None:
        """Refuses, before any work, token ids that the vocabulary lacks and lengths that the
        context can't hold; names the row. again: reads all tokens of a batch, also where that was
        done as it was made; without it, an id that was written into it since may pass."""
        if isinstance(request, (requests.Forward, requests.ForwardBackward)):
            batch = request.batch
            for what, ids in (("prompt", batch.prompts), ("response", batch.responses)):
                if again or highest_id_seen(ids) >= self.vocab_size:
                    self._check_ids(what, ids)
            if self.context_length is not None:
                lengths = batch.prompts.lengths[batch.prompt_index] + batch.responses.lengths
                self._check_lengths(lengths, "prompt and response have", self.context_length)
        elif isinstance(request, requests.Generate):
            self._check_ids("prompt", request.prompts)
            check_ends(request.params, self.name, self.vocab_size, self.eos_token_ids)
            if self.context_length is not None:
                lengths = request.prompts.lengths + request.params.max_tokens
                self._check_lengths(lengths, "prompt and max_tokens come to", self.context_length)

    def _check_ids(self, what: str, ids: Ragged) -> None:
        if highest_id(ids) >= self.vocab_size:
            position = int(np.argmax(ids.values.view(np.uint32)))  # as `highest_id` sees them
            row = int(np.searchsorted(ids.offsets, position, side="right") - 1)
            raise InvalidRequestError(
                f"{what} {row} holds token id {ids.values[position]}, but model {self.name!r} has "
                f"{self.vocab_size} ids; was it encoded with another tokenizer?",
                row=row,
            )

    def _check_lengths(self, lengths: Array, what: str, most: int) -> None:
        if int(lengths.max(initial=0)) > most:
            row = int(np.argmax(lengths))
            raise InvalidRequestError(
                f"row {row}: {what} {lengths[row]} tokens, more than the context of "
                f"{most} that model {self.name!r} has",
                row=row,
            )


@runtime_checkable
class OperationContext(Protocol):
    """What the dispatcher tells a running backend method, and hears from it."""

    @property
    def request_id(self) -> str:
        """Names this operation: "CLIENT:STREAM:NUMBER"."""

    @property
    def version(self) -> int:
        """Version of the trainer's weights as this operation starts."""

    @property
    def next_version(self) -> int:
        """The version to give the weights if this operation changes them."""

    @property
    def directory(self) -> Path:
        """Where save and export write (empty, moved into place afterwards) and load reads."""

    @property
    def seed(self) -> int:
        """For generate: the request's seed, or the one derived for it; [0, 2**63)."""

    @property
    def cancelled(self) -> bool:
        """Whether the caller, a deadline or an abort wants this operation to end early."""

    def progress(self, done: float, total: float | None = None, what: str = "") -> None:
        """A sign of life; `what` is what it is doing, for errors and progress lines."""

    def emit(self, sample: Sample) -> None:
        """For generate: one finished sample, for callers that iterate."""

    def lost(self, reason: str) -> None:
        """Says that the engine has died, `reason` how: the run ends as by a `RunLostError`, and all
        clients hear it at once. At any time and from any thread, also on the context of `start`
        when nothing runs, so that whatever supervises the workers can say it; once is enough."""

    async def thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Runs a blocking function off the loop."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Waits on the dispatcher's clock."""

    @property
    def abort_signal(self) -> asyncio.Event:
        """Set when `cancelled` becomes true."""


class Training(Protocol):
    """The trainer: owns weights, optimizer state, accumulator, snapshots and reference."""

    async def forward(self, request: requests.Forward, context: OperationContext) -> Outputs: ...
    async def forward_backward(
        self, request: requests.ForwardBackward, context: OperationContext
    ) -> results.ForwardBackwardResult: ...
    async def optim_step(
        self, request: requests.OptimStep, context: OperationContext
    ) -> results.OptimStepResult: ...
    async def zero_grad(self, request: requests.ZeroGrad, context: OperationContext) -> None: ...
    async def snapshot(self, request: requests.Snapshot, context: OperationContext) -> None: ...
    async def restore_snapshot(
        self, request: requests.RestoreSnapshot, context: OperationContext
    ) -> None: ...
    async def drop_snapshot(
        self, request: requests.DropSnapshot, context: OperationContext
    ) -> None: ...
    async def set_reference(
        self, request: requests.SetReference, context: OperationContext
    ) -> None: ...
    async def save(self, request: requests.Save, context: OperationContext) -> bool:
        """Writes into `context.directory`; True where a reference other than the base is inside."""
        ...

    async def load(self, request: requests.Load, context: OperationContext) -> None: ...
    async def export(self, request: requests.Export, context: OperationContext) -> None: ...


class Sampling(Protocol):
    """The sampler: serves its own copy of the weights.

    An abort reaches `generate` as `context.abort_signal`: it returns what it has, the unfinished
    samples with finish_reason "abort"."""

    async def generate(
        self, request: requests.Generate, context: OperationContext
    ) -> Generation: ...
    async def pause(self, request: requests.Pause, context: OperationContext) -> None: ...
    async def resume(self, request: requests.Resume, context: OperationContext) -> None: ...
    async def reset_prefix_cache(
        self, request: requests.ResetPrefixCache, context: OperationContext
    ) -> None: ...
    async def finish_session(
        self, request: requests.FinishSession, context: OperationContext
    ) -> None: ...


class WeightSync(Protocol):
    """The path from trainer (or client) to sampler. A failure leaves the sampler serving its old
    version, or marks its version unknown; it never serves mixed weights under a number."""

    async def sync(self, request: requests.Sync, context: OperationContext) -> SyncReceipt: ...
    async def push_part(self, request: requests.PushPart, context: OperationContext) -> None:
        """Keeps a part of a push aside, for the push that names its transfer."""

    async def push(self, request: requests.Push, context: OperationContext) -> SyncReceipt: ...


class Backend(Protocol):
    """One engine: a run has exactly one. The constructor only checks its options; `start` does the
    work. `close` is called once, also after a failed start; `kill` must not wait.
    It may have `devices` as well, a `types.Devices`, which `info` shows from the start on."""

    @property
    def name(self) -> str: ...
    @property
    def capabilities(self) -> Capabilities: ...
    @property
    def model(self) -> ModelInfo: ...
    @property
    def seed(self) -> int:
        """The run's seed, from which the dispatcher derives one for each unseeded generate."""
        ...

    @property
    def training(self) -> Training: ...
    @property
    def sampling(self) -> Sampling: ...
    @property
    def weights(self) -> WeightSync: ...

    async def start(self, context: OperationContext) -> None: ...
    async def close(self) -> None: ...
    def kill(self) -> None: ...
    async def reset(self, request: requests.Reset, context: OperationContext) -> None:
        """Back to base weights at `context.next_version`, on trainer and sampler: optimizer,
        accumulator, snapshots and reference as at the start."""

    async def sleep(self, request: requests.Sleep, context: OperationContext) -> None: ...
    async def wake(self, request: requests.Wake, context: OperationContext) -> None: ...
    async def tokenizer(
        self, request: requests.Tokenizer, context: OperationContext
    ) -> TokenizerFiles: ...
    def sampler_version(self) -> tuple[int | None, int | str | None]:
        """Version and label that the sampler serves; version None where unknown."""
