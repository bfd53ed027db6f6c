"""Mock backend: the trainer (imports the passes, the optimizer, checkpoints, journal, and the
contract)."""

from __future__ import annotations

import math
import time

import attrs
import numpy as np

from remote_rl.errors import BackendError
from remote_rl.losses import LossValue, merge_metrics, metric_values, resolve
from remote_rl.protocol import OperationContext
from remote_rl.requests import (
    DropSnapshot,
    Export,
    Forward,
    ForwardBackward,
    Load,
    OptimStep,
    RestoreSnapshot,
    Save,
    SetReference,
    Snapshot,
    ZeroGrad,
)
from remote_rl.types import Batch, ForwardBackwardResult, OptimStepResult, Outputs, Work

from .checkpoints import Contents, read_checkpoint, write_checkpoint, write_export
from .config import MockConfig
from .journal import Journal
from .model import Floats, Weights, forward_flops
from .optimizer import OptimizerState, adamw_step, clipped, gradient_norm
from .passes import added, backward, micro_batches, outputs


@attrs.frozen(eq=False)
class Policy:
    """Weights and the version they are known by."""

    weights: Weights
    version: int


@attrs.define(eq=False)
class State:
    """All that a trainer holds. gradient: the accumulator, None while it is empty."""

    base: Policy
    policy: Policy
    reference: Policy
    optimizer: OptimizerState
    snapshots: dict[str, Policy] = attrs.field(factory=dict)
    gradient: dict[str, Floats] | None = None

    @classmethod
    def fresh(cls, base: Policy) -> State:
        """That of a new run."""
        return cls(base, base, base, OptimizerState.fresh(base.weights))


class Trainer:
    """Owns weights, optimizer state, accumulator, snapshots and reference; implements
    `protocol.Training`. Its operations come one after the other."""

    def __init__(self, config: MockConfig, journal: Journal) -> None:
        self._config = config
        self._journal = journal
        self._held: State | None = None

    @property
    def _state(self) -> State:
        if self._held is None:
            raise BackendError("the mock backend was not started")
        return self._held

    @property
    def policy(self) -> Policy:
        """The current weights."""
        return self._state.policy

    def begin(self, weights: Weights, version: int) -> None:
        """At the start: these base weights, and nothing else."""
        self._held = State.fresh(Policy(weights, version))

    def reset(self, version: int) -> Policy:
        """Back to the base weights, under a new version."""
        self._held = State.fresh(attrs.evolve(self._state.base, version=version))
        return self.policy

    # -- forward and backward -----------------------------------------------------------------

    async def forward(self, request: Forward, context: OperationContext) -> Outputs:
        """Outputs of the current policy, the reference or a snapshot, without a gradient."""
        async with self._journal.operation("forward", request, context):
            batch = request.batch
            policy = self._named(request.policy)
            begin = time.perf_counter()
            done = []
            for rows in micro_batches(len(batch), self._config.micro_batch_rows):
                piece = batch if rows is None else batch.select(rows)
                done.append(await context.thread(outputs, policy.weights, piece))
                context.progress(len(done), None, "forward")
            columns = {
                name: np.concatenate([piece[name] for piece in done]).astype(np.float32)
                for name in request.outputs
            }
            return Outputs(
                values={
                    name: batch.responses.with_values(column) for name, column in columns.items()
                },
                version=policy.version,
                work=self._work(batch, 1, begin),
            )

    async def forward_backward(
        self, request: ForwardBackward, context: OperationContext
    ) -> ForwardBackwardResult:
        """Adds a loss's gradient to the accumulator, all of it or, when it fails, nothing."""
        async with self._journal.operation("forward_backward", request, context):
            batch, policy = request.batch, self.policy
            request.loss.check(batch)
            begin = time.perf_counter()
            loss = resolve(request.loss, batch)
            total, done = self._state.gradient, list[LossValue]()
            for rows in micro_batches(len(batch), self._config.micro_batch_rows):
                piece = batch if rows is None else batch.select(rows)
                part = loss if rows is None else loss.select(rows)
                value, gradient = await context.thread(backward, policy.weights, piece, part)
                total = added(total, gradient)
                done.append(value)
                context.progress(len(done), None, "forward and backward")
            self._state.gradient = total
            return ForwardBackwardResult(
                value=sum(value.value for value in done),
                metrics=metric_values(merge_metrics(value.metrics for value in done)),
                version=policy.version,
                work=self._work(batch, 3, begin),
            )

    def _work(self, batch: Batch, forwards: int, begin: float) -> Work:
        """Of a batch, worth so many forwards: the model looks prompts up, and computes a position
        for each response token only."""
        tokens = len(batch.responses.values)
        flops = forwards * tokens * forward_flops(**self._config.sizes)
        return Work(tokens=tokens, flops=flops, seconds=time.perf_counter() - begin)

    # -- the optimizer ------------------------------------------------------------------------

    async def optim_step(self, request: OptimStep, context: OperationContext) -> OptimStepResult:
        """One AdamW step; a gradient that is not finite is dropped and changes nothing."""
        async with self._journal.operation("optim_step", request, context):
            state = self._state
            policy, gradient, options = state.policy, state.gradient, request.optimizer
            begin = time.perf_counter()
            assert gradient is not None, "the dispatcher lets no step through without one"
            norm = await context.thread(gradient_norm, gradient)
            if not math.isfinite(norm):
                state.gradient = None
                return _skipped(norm, policy, begin)
            scaled = clipped(gradient, norm, options.max_grad_norm)
            weights, moments = await context.thread(
                adamw_step, policy.weights, scaled, state.optimizer, options
            )
            state.gradient = None
            if not math.isfinite(await context.thread(gradient_norm, weights)):
                return _skipped(norm, policy, begin)
            state.policy = Policy(weights, context.next_version)
            state.optimizer = moments
            return OptimStepResult(
                grad_norm=norm,
                skipped=False,
                version=context.next_version,
                metrics={"optimizer_steps": float(moments.step)},
                work=_step_work(begin),
            )

    async def zero_grad(self, request: ZeroGrad, context: OperationContext) -> None:
        """Discards the accumulated gradient."""
        async with self._journal.operation("zero_grad", request, context):
            self._state.gradient = None

    # -- snapshots and the reference ----------------------------------------------------------

    async def snapshot(self, request: Snapshot, context: OperationContext) -> None:
        """Keeps the current weights."""
        async with self._journal.operation("snapshot", request, context):
            self._state.snapshots[request.name] = self.policy

    async def restore_snapshot(self, request: RestoreSnapshot, context: OperationContext) -> None:
        """Makes a snapshot's weights current; the optimizer's state stays."""
        async with self._journal.operation("restore_snapshot", request, context):
            weights = self._state.snapshots[request.name].weights
            self._state.policy = Policy(weights, context.next_version)
            self._state.gradient = None

    async def drop_snapshot(self, request: DropSnapshot, context: OperationContext) -> None:
        """Forgets a snapshot; a reference that was set from it stays."""
        async with self._journal.operation("drop_snapshot", request, context):
            del self._state.snapshots[request.name]

    async def set_reference(self, request: SetReference, context: OperationContext) -> None:
        """Sets the reference to the base, the current weights or a snapshot's."""
        async with self._journal.operation("set_reference", request, context):
            self._state.reference = self._named(request.source)

    def _named(self, name: str) -> Policy:
        if name == "current":
            return self.policy
        if name == "base":
            return self._state.base
        return self._state.reference if name == "reference" else self._state.snapshots[name]

    # -- files --------------------------------------------------------------------------------

    async def save(self, request: Save, context: OperationContext) -> bool:
        """Writes weights, reference and, if wanted, optimizer state; True where the reference is
        not the base."""
        async with self._journal.operation("save", request, context):
            state = self._state
            contents = Contents(
                weights=state.policy.weights,
                reference=state.reference.weights,
                reference_version=state.reference.version,
                optimizer=state.optimizer if request.optimizer else None,
            )
            await context.thread(write_checkpoint, context.directory, contents)
            return state.reference.weights is not state.base.weights

    async def load(self, request: Load, context: OperationContext) -> None:
        """Restores a checkpoint, all of it or, when it fails, nothing."""
        async with self._journal.operation("load", request, context):
            state = self._state
            contents = await context.thread(read_checkpoint, context.directory, state.base.weights)
            optimizer = contents.optimizer
            if not request.optimizer:
                optimizer = OptimizerState.fresh(contents.weights)
            assert optimizer is not None, "the dispatcher loads only what was saved"
            state.policy = Policy(contents.weights, context.next_version)
            state.reference = Policy(contents.reference, contents.reference_version)
            if _equal(contents.reference, state.base.weights):
                state.reference = state.base
            state.optimizer = optimizer
            state.gradient = None

    async def export(self, request: Export, context: OperationContext) -> None:
        """Writes a Hugging Face directory of the current weights."""
        async with self._journal.operation("export", request, context):
            await context.thread(write_export, context.directory, self.policy.weights, self._config)


def _skipped(norm: float, policy: Policy, begin: float) -> OptimStepResult:
    return OptimStepResult(
        grad_norm=norm, skipped=True, version=policy.version, work=_step_work(begin)
    )


def _step_work(begin: float) -> Work:
    return Work(tokens=0, flops=0.0, seconds=time.perf_counter() - begin)


def _equal(left: Weights, right: Weights) -> bool:
    return all(np.array_equal(left[name], right[name]) for name in left)
