"""Arctic backend: operations of the trainer, cut into what each rank does and put together again
(imports plan, trainers and the contract)."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from remote_rl.errors import ConflictError, describe
from remote_rl.losses import merge_metrics, metric_values, resolve
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
from remote_rl.types import Batch, ForwardBackwardResult, OptimStepResult, Outputs, Ragged, Work
from remote_rl.types.flops import packed_tokens

from .config import ArcticConfig
from .plan import Share, shares
from .trainers import TrainerGroup

_FACTS = "arctic.json"


class TrainingFace:
    """Implements `protocol.Training` on the ranks. It knows which versions the weights have that
    the ranks hold beside the current ones."""

    def __init__(
        self,
        config: ArcticConfig,
        trainers: TrainerGroup,
        start: Callable[[OperationContext], Awaitable[None]],
    ) -> None:
        self._config = config
        self._trainers = trainers
        self._start = start
        self._base = self._reference = 0
        self._snapshots: dict[str, int] = {}

    def begin(self, version: int) -> None:
        """At the start: base weights of this version, and nothing else."""
        self._base = self._reference = version
        self._snapshots = {}

    # -- forward and backward -----------------------------------------------------------------

    async def forward(self, request: Forward, context: OperationContext) -> Outputs:
        """Outputs of the current policy, the reference or a snapshot, without a gradient."""
        batch, policy = request.batch, request.policy
        version = self._version_of(policy, context)
        dealt = await context.thread(self._deal, batch)
        given = [(_part(batch, share), share.pieces, request.outputs, policy) for share in dealt]
        results, seconds = await self._trainers.measured("forward", given, context)
        values = {
            name: await context.thread(
                _put_together, batch, dealt, [result[name] for result in results]
            )
            for name in request.outputs
        }
        return Outputs(
            values=values,
            version=version,
            metrics=_metrics("forward", batch, dealt),
            work=self._work(batch, seconds),
        )

    async def forward_backward(
        self, request: ForwardBackward, context: OperationContext
    ) -> ForwardBackwardResult:
        """Adds a loss's gradient to the accumulator."""
        batch = request.batch
        request.loss.check(batch)
        loss = resolve(request.loss, batch)
        dealt = await context.thread(self._deal, batch)
        given = [(_part(batch, share), share.pieces, loss.select(share.rows)) for share in dealt]
        results, seconds = await self._trainers.measured("forward_backward", given, context)
        merged = metric_values(merge_metrics(result.metrics for result in results))
        return ForwardBackwardResult(
            value=sum(result.value for result in results),
            metrics={**merged, **_metrics("training", batch, dealt)},
            version=context.version,
            work=self._work(batch, seconds, backward=True),
        )

    def _work(self, batch: Batch, seconds: float, *, backward: bool = False) -> Work:
        tokens, facts = packed_tokens(batch), self._trainers.facts
        if facts.shape is None:
            return Work(tokens=tokens, flops=None, seconds=seconds, reason=facts.uncounted)
        flops = facts.shape.forward(batch) + (facts.shape.backward(batch) if backward else 0.0)
        return Work(tokens=tokens, flops=flops, seconds=seconds)

    def _deal(self, batch: Batch) -> list[Share]:
        return shares(batch, self._trainers.size, self._config.training.token_budget)

    # -- the optimizer ------------------------------------------------------------------------

    async def optim_step(self, request: OptimStep, context: OperationContext) -> OptimStepResult:
        """One AdamW step in all ranks."""
        given = [(request.optimizer,)] * self._trainers.size
        results, seconds = await self._trainers.measured("optim_step", given, context)
        taken = results[0]  # the same in all of them
        return OptimStepResult(
            grad_norm=taken.grad_norm,
            skipped=taken.skipped,
            version=context.version if taken.skipped else context.next_version,
            metrics={"optimizer_steps": float(taken.steps)},
            work=Work(tokens=0, flops=0.0, seconds=seconds),
        )

    async def zero_grad(self, request: ZeroGrad, context: OperationContext) -> None:
        """Discards the accumulated gradient."""
        await self._everywhere("zero_grad", context=context)

    # -- snapshots and the reference ----------------------------------------------------------

    async def snapshot(self, request: Snapshot, context: OperationContext) -> None:
        """Keeps the current weights."""
        await self._everywhere("snapshot", request.name, context=context)
        self._snapshots[request.name] = context.version

    async def restore_snapshot(self, request: RestoreSnapshot, context: OperationContext) -> None:
        """Makes a snapshot's weights current."""
        self._version_of(request.name, context)
        await self._everywhere("restore_snapshot", request.name, context=context)

    async def drop_snapshot(self, request: DropSnapshot, context: OperationContext) -> None:
        """Forgets a snapshot, also one that went with the ranks that held it."""
        if self._snapshots.pop(request.name, None) is not None:
            await self._everywhere("drop_snapshot", request.name, context=context)

    async def set_reference(self, request: SetReference, context: OperationContext) -> None:
        """Sets the reference to the base, the current weights or a snapshot's."""
        version = self._version_of(request.source, context)
        await self._everywhere("set_reference", request.source, context=context)
        self._reference = version

    def _version_of(self, policy: str, context: OperationContext) -> int:
        known = {"current": context.version, "base": self._base, "reference": self._reference}
        if policy in known:
            return known[policy]
        if policy not in self._snapshots:
            raise ConflictError(
                f"snapshot {policy!r} went with the training ranks, which died and were started "
                "again; drop it, and take another"
            )
        return self._snapshots[policy]

    # -- files --------------------------------------------------------------------------------

    async def save(self, request: Save, context: OperationContext) -> bool:
        """Writes weights, reference and, if wanted, optimizer state; True where the reference is
        not the base."""
        directory = context.directory
        await context.thread(lambda: directory.mkdir(parents=True, exist_ok=True))
        results = await self._everywhere("save", directory, request.optimizer, context=context)
        facts = json.dumps({"reference_version": self._reference})
        await context.thread((directory / _FACTS).write_text, facts)
        return bool(results[0])

    async def load(self, request: Load, context: OperationContext) -> None:
        """Restores a checkpoint, on new ranks where the old ones died."""
        directory = context.directory
        try:
            facts = json.loads(await context.thread((directory / _FACTS).read_text))
            reference = int(facts["reference_version"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConflictError(
                f"the checkpoint's {_FACTS} is damaged ({describe(error)}), or it was written by "
                "another backend; load another one"
            ) from error
        await self._revive(context)
        results = await self._everywhere("load", directory, request.optimizer, context=context)
        self._reference = reference if results[0] else self._base

    async def export(self, request: Export, context: OperationContext) -> None:
        """Writes a Hugging Face directory of the current weights."""
        directory = context.directory
        await context.thread(lambda: directory.mkdir(parents=True, exist_ok=True))
        await self._everywhere("export", directory, context=context)

    # -- life ---------------------------------------------------------------------------------

    async def reset(self, context: OperationContext) -> None:
        """Back to the base weights, as `context.next_version`."""
        await self._revive(context)
        await self._everywhere("reset", context=context)
        self.begin(context.next_version)

    async def _revive(self, context: OperationContext) -> None:
        if not await self._trainers.alive():
            await self._start(context)
            self._snapshots = {}

    async def _everywhere(
        self, method: str, *arguments: Any, context: OperationContext
    ) -> list[Any]:
        return await self._trainers.everywhere(method, *arguments, context=context)


def _part(batch: Batch, share: Share) -> Batch | None:
    return batch.select(share.rows) if len(share.rows) else None


def _put_together(batch: Batch, dealt: list[Share], columns: list[Any]) -> Ragged:
    """What the ranks computed for their rows, in the order of the batch."""
    rows = np.concatenate([share.rows for share in dealt])
    lengths = batch.responses.lengths[rows]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    held = Ragged(values=np.concatenate(columns).astype(np.float32), offsets=offsets)
    return held.select(np.argsort(rows))


def _metrics(prefix: str, batch: Batch, dealt: list[Share]) -> dict[str, float]:
    """Tokens that were computed, and how evenly: those of the fullest rank by the mean."""
    tokens = [
        sum(packed_tokens(batch, share.rows[piece]) for piece in share.pieces) for share in dealt
    ]
    return {
        f"{prefix}_tokens": float(sum(tokens)),
        "rank_tokens_max_over_mean": max(tokens) * len(tokens) / max(sum(tokens), 1),
        "pieces": float(len(dealt[0].pieces)),
    }
