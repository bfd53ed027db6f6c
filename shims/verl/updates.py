"""Shim (loop side, above the client): what the worker does with verl's rows, without verl's worker.

Imports verl's tensor-dict helpers and remote_rl.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tensordict import TensorDict
from verl.utils import tensordict_utils

from remote_rl import Batch, Session
from remote_rl.losses import Loss

from .batches import counted_tokens, ragged, scalar, to_batch, to_sequences
from .losses import build_loss, is_named
from .metrics import collect, mini_batch_metrics
from .optimizer import Optimizer
from .own_losses import build_own_loss


def forward(session: Session, data: TensorDict, outputs: set[str], policy: str) -> TensorDict:
    """`log_probs` and perhaps `entropy`, [B, P + R], as verl's engines return them."""
    computed = session.training.forward(to_batch(data), outputs=outputs, policy=policy).result()
    prompts = ragged(data, "prompts")
    tensors = {"log_probs": to_sequences(computed["logprobs"], prompts)}
    if "entropy" in outputs:
        tensors["entropy"] = to_sequences(computed["entropy"], prompts)
    return tensordict_utils.get_tensordict(tensors)


def update(
    session: Session, actor: Any, optimizer: Optimizer, data: TensorDict
) -> dict[str, list[float]]:
    """One optimizer step a mini-batch; the metrics by verl's names.

    Every step is submitted, in order, before the first is waited for. The learning rate is that of
    the whole call, and moves once at its end, as in verl's `train_mini_batch`.
    """
    adamw = optimizer.adamw()
    submitted = []
    for batch, loss in mini_batches(actor, data):
        gradient = session.training.forward_backward(batch, loss)
        submitted.append((gradient, session.training.optim_step(adamw)))
    rows = [
        mini_batch_metrics(gradient.result(), step.result(), actor) for gradient, step in submitted
    ]
    return collect(rows, optimizer.advance())


def mini_batches(actor: Any, data: TensorDict) -> Iterator[tuple[Batch, Loss]]:
    """The mini-batches in verl's own order: `mini_batch_size`, `epochs`, `seed` and `shuffle` are
    those that came with the call."""
    size = scalar(data, "mini_batch_size")
    entropy = bool(scalar(data, "calculate_entropy", False))
    sequences = scalar(data, "global_batch_size", size)
    for rows in tensordict_utils.make_iterator(
        data,
        mini_batch_size=size,
        epochs=scalar(data, "epochs", 1),
        seed=scalar(data, "seed", 42),
        dataloader_kwargs=scalar(data, "dataloader_kwargs", {}),
    ):
        counts = {"tokens": counted_tokens(rows), "sequences": sequences, "entropy": entropy}
        if is_named(actor):
            loss: Loss = build_loss(actor, **counts)
        else:
            loss = build_own_loss(actor, rows, **counts)
        yield to_batch(rows, training=True), loss
