"""Each semantic field of Batch and of the losses changes what the mock computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_proofs import Lab, Proof, check, outcome
from client_support import SessionFactory

from remote_rl import AdamW, Batch, Ragged, losses
from remote_rl.losses import (
    CISPO,
    KL,
    PPO,
    Cotangents,
    CrossEntropy,
    Entropy,
    ImportanceSampling,
    Loss,
    Reinforce,
)

#: ratios from far below to far above 1, advantages of both signs
BATCH = Batch(
    prompts=[[1, 2], [3]],
    prompt_index=[0, 1, 1],
    responses=[[1, 2, 3, 4], [5, 6], [7, 8, 9]],
    temperature=1.0,
    advantages=[[1.0, -1.0, 1.0, -1.0], [0.5, -0.5], [2.0, -2.0, -1.0]],
    old_logprobs=[[-6.0, -6.0, -0.1, -0.1], [-2.5, -2.0], [-30.0, -2.0, 0.0]],
    ref_logprobs=[[-6.0, -1.0, -0.1, -3.0], [-2.5, -4.0], [-9.0, -2.0, 0.0]],
)

#: one that no token's clipping makes blind
MILD = ImportanceSampling(log_ratio_clamp=3)


def gradient(lab: Lab, loss: Loss, batch: Batch = BATCH) -> Any:
    """Value and gradient norm, or the refusal."""
    result = outcome(lab.rl.training.forward_backward(batch, loss))
    if isinstance(result, tuple):
        return result
    step = lab.rl.training.optim_step(AdamW(lr=0.0, weight_decay=0.0)).result()
    return result.value, step.grad_norm


def of_loss(kind: type[Loss], field: str, one: Any, other: Any, **rest: Any) -> Proof:
    return Proof(gradient, kind(**{field: one}, **rest), kind(**{field: other}, **rest))


def of_batch(field: str, other: Any, loss: Loss = MILD) -> Proof:
    """`other` instead of what BATCH holds."""

    def measure(lab: Lab, batch: Batch) -> Any:
        return gradient(lab, loss, batch)

    return Proof(measure, BATCH, BATCH.replace(**{field: other}))


def constant(value: float) -> Ragged:
    return BATCH.responses.with_values(np.full(9, value, np.float32))


def of_kl(field: str, one: Any, other: Any, **rest: Any) -> Proof:
    terms = [KL(**{"coef": 0.5, field: value, **rest}) for value in (one, other)]
    return Proof(gradient, *(Reinforce(kl=term) for term in terms))


def with_aggregation(one: losses.Aggregation, other: losses.Aggregation) -> Proof:
    return of_loss(Reinforce, "aggregation", one, other)


def cotangents(slope: float, version: int = 0) -> Cotangents:
    return Cotangents({"logprobs": constant(slope)}, version=version)


PROOFS: dict[str, Proof] = {
    "Batch.prompts": of_batch("prompts", [[4, 2], [3]]),
    "Batch.prompt_index": of_batch("prompt_index", [1, 1, 1]),
    "Batch.responses": of_batch("responses", [[1, 2, 3, 4], [5, 6], [7, 8, 0]]),
    "Batch.temperature": of_batch("temperature", 2.0),
    "Batch.mask": of_batch("mask", [[1, 1, 0, 1], [1, 1], [1, 1, 1]]),
    "Batch.importance_weights": of_batch("importance_weights", constant(0.5)),
    "Batch.advantages": of_batch("advantages", constant(1.0)),
    "Batch.old_logprobs": of_batch("old_logprobs", constant(-2.0)),
    "Batch.ref_logprobs": of_batch("ref_logprobs", constant(-2.0), PPO(kl=KL(0.5))),
    "Cotangents.values": Proof(gradient, cotangents(1.0), cotangents(2.0)),
    "Cotangents.version": Proof(gradient, cotangents(1.0), cotangents(1.0, version=1)),
    "PPO.clip_low": of_loss(PPO, "clip_low", 0.2, 0.5),
    "PPO.clip_high": of_loss(PPO, "clip_high", 0.2, 0.5),
    "PPO.dual_clip": of_loss(PPO, "dual_clip", None, 3.0),
    "PPO.ratio": of_loss(PPO, "ratio", "token", "sequence"),
    "PPO.log_ratio_clamp": of_loss(PPO, "log_ratio_clamp", 20, 1),
    "CISPO.clip_low": of_loss(CISPO, "clip_low", 0.2, None),
    "CISPO.clip_high": of_loss(CISPO, "clip_high", 0.2, 2.0),
    "CISPO.log_ratio_clamp": of_loss(CISPO, "log_ratio_clamp", 20, 0.01),
    "ImportanceSampling.ratio": of_loss(ImportanceSampling, "ratio", "token", "sequence"),
    "ImportanceSampling.log_ratio_clamp": of_loss(ImportanceSampling, "log_ratio_clamp", 5, 2),
    "KL.coef": of_kl("coef", 0.5, 0.25),
    "KL.estimator": of_kl("estimator", "k1", "k2"),
    "KL.aggregation": of_kl("aggregation", "token_mean", "sequence_mean_token_mean"),
    "KL.log_ratio_clamp": of_kl("log_ratio_clamp", None, 0.5, estimator="k2"),
    "KL.value_clamp": of_kl("value_clamp", None, 0.5, estimator="k2"),
    "Entropy.coef": Proof(
        gradient, Reinforce(entropy=Entropy(0.5)), Reinforce(entropy=Entropy(0.25))
    ),
    "Entropy.aggregation": Proof(
        gradient,
        Reinforce(entropy=Entropy(0.5)),
        Reinforce(entropy=Entropy(0.5, aggregation="sequence_mean_token_mean")),
    ),
    "Aggregation.kind": with_aggregation(losses.token_mean(), losses.sequence_mean_token_sum()),
    "Aggregation.denominator": with_aggregation(losses.token_mean(), losses.token_mean(5)),
    "Aggregation.width": with_aggregation(
        losses.sequence_mean_token_sum_norm(4), losses.sequence_mean_token_sum_norm(8)
    ),
}
for _loss in (PPO, CISPO, ImportanceSampling, Reinforce, CrossEntropy):
    PROOFS |= {
        f"{_loss.__name__}.aggregation": of_loss(
            _loss, "aggregation", "token_mean", "sequence_mean_token_mean"
        ),
        f"{_loss.__name__}.kl": of_loss(_loss, "kl", None, KL(0.5)),
        f"{_loss.__name__}.entropy": of_loss(_loss, "entropy", None, Entropy(0.5)),
        f"{_loss.__name__}.scale": of_loss(_loss, "scale", 1.0, 0.5),
    }


@pytest.mark.parametrize("field", PROOFS)
def test_the_field_changes_the_gradient(
    field: str, session_factory: SessionFactory, tmp_path: Path
) -> None:
    check(PROOFS[field], session_factory, tmp_path)
