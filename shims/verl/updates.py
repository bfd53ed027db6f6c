"""Shim (loop side, above the client): what the worker does with verl's rows, without verl's worker.

Imports attrs, verl's tensor-dict helpers and remote_rl.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import attrs
from tensordict import TensorDict
from verl.utils import tensordict_utils

from remote_rl import AdamW, Operation, Outputs, Session, Work
from remote_rl.losses import Cotangents
from remote_rl.types import Batch, ForwardBackwardResult, OptimStepResult

from ..common.derivatives import OwnLoss
from ..common.known_outputs import KnownOutputs
from .batches import counted_tokens, ragged, scalar, to_batch, to_sequences
from .losses import build_loss, is_named
from .metrics import Meter, collect, mini_batch_metrics
from .optimizer import Optimizer
from .own_losses import evaluate_own_loss, needed_outputs

log = logging.getLogger("remote_rl.shims.verl")


def forward(
    session: Session,
    data: TensorDict,
    outputs: set[str],
    policy: str,
    known: KnownOutputs | None = None,
    meter: Meter | None = None,
) -> TensorDict:
    """`log_probs` and perhaps `entropy`, [B, P + R], and `metrics` with `mfu`, as verl's engines
    return them.

    known: keeps what the current policy's forward returned, for the update that follows. meter:
    takes note of what it cost.
    """
    batch = to_batch(data)
    computed = session.training.forward(batch, outputs=outputs, policy=policy).result()
    if known is not None and policy == "current":
        known.remember(batch, computed)
    prompts = ragged(data, "prompts")
    tensors = {"log_probs": to_sequences(computed["logprobs"], prompts)}
    if "entropy" in outputs:
        tensors["entropy"] = to_sequences(computed["entropy"], prompts)
    share = (meter or Meter()).forward(computed, policy)
    return tensordict_utils.get_tensordict(tensors, {"metrics": {"mfu": share}})


def update(
    session: Session,
    actor: Any,
    optimizer: Optimizer,
    data: TensorDict,
    known: KnownOutputs | None = None,
    meter: Meter | None = None,
) -> dict[str, list[float]]:
    """One optimizer step a mini-batch; the metrics by verl's names.

    Every step is submitted, in order, before the first is waited for; a loss of verl's own waits
    for its outputs, which `known` may hold already. The learning rate is that of the whole call,
    and moves once at its end, as in verl's `train_mini_batch`, also where a step was skipped.
    """
    adamw, call = optimizer.adamw(), _Call.of(session, actor, data, known)
    submit = call.submit_named if is_named(actor) else call.submit_own
    submitted = [submit(rows, adamw) for rows in mini_batches(data)]
    rows = [mini_batch_metrics(*each.results(), actor) for each in submitted]
    for number, norm in enumerate(row["grad_norm"] for row in rows):
        if not math.isfinite(norm):
            log.warning("mini-batch %d was skipped: its gradient's norm is %s", number, norm)
    lists = collect(rows, optimizer.advance())
    lists["extra_forward_tokens"] = [float(call.extra_forward_tokens)]
    works = call.forwards + [work for each in submitted for work in each.works()]
    return lists | (meter or Meter()).update(works)


def mini_batches(data: TensorDict) -> Iterator[TensorDict]:
    """The mini-batches in verl's own order: `mini_batch_size`, `epochs`, `seed` and `shuffle` are
    those that came with the call."""
    mini_batches: Iterator[TensorDict] = tensordict_utils.make_iterator(
        data,
        mini_batch_size=scalar(data, "mini_batch_size"),
        epochs=scalar(data, "epochs", 1),
        seed=scalar(data, "seed", 42),
        dataloader_kwargs=scalar(data, "dataloader_kwargs", {}),
    )
    return mini_batches


@attrs.frozen
class _Submitted:
    """A mini-batch on its way. own: of a loss that ran here; the operations are None where that
    had no finite gradient, so that nothing was sent."""

    gradient: Operation[ForwardBackwardResult] | None
    step: Operation[OptimStepResult] | None
    own: OwnLoss | None = None

    def results(self) -> tuple[ForwardBackwardResult, OptimStepResult]:
        if self.gradient is None or self.step is None:
            assert self.own is not None
            found = ForwardBackwardResult(value=math.nan, version=self.own.version)
            step = OptimStepResult(grad_norm=math.nan, skipped=True, version=self.own.version)
        else:
            found, step = self.gradient.result(), self.step.result()
        if self.own is not None:
            metrics = {**found.metrics, **self.own.metrics}
            found = attrs.evolve(found, value=self.own.value, metrics=metrics)
        return found, step

    def works(self) -> list[Work | None]:
        """Of the operations that were sent and have ended."""
        sent = (self.gradient, self.step)
        return [operation.result().work for operation in sent if operation is not None]


@attrs.define
class _Call:
    """One call of `update`. sequences, entropy: verl's `global_batch_size`, `calculate_entropy`.
    version: of the trainer's weights as far as it is known. extra_forward_tokens: prompt and
    response tokens of the forwards that only a loss of verl's own made necessary; forwards: their
    work."""

    session: Session
    actor: Any
    known: KnownOutputs | None
    sequences: int
    entropy: bool
    version: int | None
    extra_forward_tokens: int = 0
    forwards: list[Work | None] = attrs.field(factory=list)

    @classmethod
    def of(
        cls, session: Session, actor: Any, data: TensorDict, known: KnownOutputs | None
    ) -> _Call:
        return cls(
            session=session,
            actor=actor,
            known=known,
            sequences=scalar(data, "global_batch_size", scalar(data, "mini_batch_size")),
            entropy=bool(scalar(data, "calculate_entropy", False)),
            version=None if known is None else session.weights.version().result().trainer,
        )

    def submit_named(self, rows: TensorDict, adamw: AdamW) -> _Submitted:
        loss = build_loss(self.actor, **self._counts(rows))
        gradient = self.session.training.forward_backward(to_batch(rows, training=True), loss)
        return _Submitted(gradient, self.session.training.optim_step(adamw))

    def submit_own(self, rows: TensorDict, adamw: AdamW) -> _Submitted:
        batch = to_batch(rows, training=True)
        own = evaluate_own_loss(self.actor, rows, self._outputs(batch), **self._counts(rows))
        if not own.finite:  # verl's engine then takes no step and trains on, as it does here
            return _Submitted(None, None, own)
        loss = Cotangents(own.derivatives, version=own.version)
        gradient = self.session.training.forward_backward(batch, loss)
        self.version = None  # what the step makes of it is not waited for
        return _Submitted(gradient, self.session.training.optim_step(adamw), own)

    def _outputs(self, batch: Batch) -> Outputs:
        names = needed_outputs(self.entropy)
        held = None if self.known is None else self.known.of(batch, names, self.version)
        if held is not None:
            return held
        self.extra_forward_tokens += len(batch.prompts.values) + len(batch.responses.values)
        computed = self.session.training.forward(batch, outputs=names).result()
        self.forwards.append(computed.work)
        return computed

    def _counts(self, rows: TensorDict) -> dict[str, Any]:
        return {
            "tokens": counted_tokens(rows),
            "sequences": self.sequences,
            "entropy": self.entropy,
        }
