"""verl's own loss functions on the outputs of a forward: against the named losses, and where there
is none (to the gradient of the weights: test_verl_stock_parity.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass

from remote_rl import Outputs, losses
from shims.verl.batches import to_batch
from shims.verl.losses import build_loss
from shims.verl.own_losses import evaluate_own_loss

ACTOR = "actor_rollout_ref.actor"
LENGTHS = [3, 1, 4, 2]
COUNTS = {"tokens": 8, "sequences": 4, "entropy": True}


@pytest.fixture
def actor(config: Callable[..., Any]) -> Callable[..., Any]:
    """verl's actor dataclass with overrides."""

    def build(*overrides: str) -> Any:
        section = config(*[f"{ACTOR}.{each}" for each in overrides]).actor_rollout_ref.actor
        return omega_conf_to_dataclass(section)

    return build


def jagged(rows: list[Any], dtype: torch.dtype) -> torch.Tensor:
    tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


def mini_batch() -> TensorDict:
    """Four rows, two uncounted tokens, ratios on both sides of every clip."""
    random = np.random.default_rng(3)
    floats = {
        name: jagged([random.normal(mean, spread, size) for size in LENGTHS], torch.float32)
        for name, mean, spread in (
            ("advantages", 0.0, 1.0),
            ("old_log_probs", -2.0, 0.4),
            ("ref_log_prob", -2.0, 0.4),
            ("rollout_is_weights", 1.0, 0.2),
        )
    }
    masks = [[1, 0, 1], [1], [1, 1, 1, 1], [1, 0]]
    tensors = {
        "prompts": jagged([[2, 3]] * 4, torch.int64),
        "responses": jagged([[5] * size for size in LENGTHS], torch.int64),
        "response_mask": jagged(masks, torch.int64),
        "loss_mask": jagged(masks, torch.int64),
        **floats,
    }
    return tensordict_utils.get_tensordict(tensors, {"temperature": 1.0})


def outputs_of(rows: TensorDict) -> Outputs:
    random = np.random.default_rng(4)
    responses = to_batch(rows).responses
    total = len(responses.values)
    values = {
        "logprobs": responses.with_values(random.normal(-2.0, 0.4, total).astype(np.float32)),
        "entropy": responses.with_values(random.uniform(1, 2, total).astype(np.float32)),
    }
    return Outputs(values=values, version=0)


@pytest.mark.parametrize("mode", ["vanilla", "gspo", "cispo", "gpg"])
@pytest.mark.parametrize("aggregation", ["token-mean", "token-sum", "seq-mean-token-mean"])
def test_where_both_exist_they_agree(
    actor: Callable[..., Any], mode: str, aggregation: str
) -> None:
    section = actor(f"policy_loss.loss_mode={mode}", f"loss_agg_mode={aggregation}")
    rows = mini_batch()
    batch, outputs = to_batch(rows, training=True), outputs_of(rows)
    own = evaluate_own_loss(section, rows, outputs, **COUNTS)
    named = losses.evaluate(
        build_loss(section, **COUNTS),
        losses.LossBatch.from_batch(batch, lambda array: array),
        {name: rows.values for name, rows in outputs.values.items()},
    )
    assert own.value == pytest.approx(named.value, rel=1e-5)
    for name, slopes in named.derivatives.items():
        np.testing.assert_allclose(own.derivatives[name].values, slopes, rtol=1e-4, atol=1e-6)
    found = own.metrics["actor/pg_loss"]
    assert found == pytest.approx(named.metrics["policy_loss"].value, rel=1e-5)


@pytest.mark.parametrize("mode", ["dppo_tv", "dppo_kl", "sapo", "kl_cov", "geo_mean", "dro"])
def test_a_loss_without_a_name_has_a_gradient_of_its_own(
    actor: Callable[..., Any], mode: str
) -> None:
    section = actor(f"policy_loss.loss_mode={mode}", "policy_loss.dro_beta=0.1", "tau_neg=1.2")
    rows = mini_batch()
    own = evaluate_own_loss(section, rows, outputs_of(rows), **COUNTS)
    assert np.isfinite(own.value)
    assert np.isfinite(own.metrics["actor/pg_loss"])
    assert own.version == 0
    slopes = own.derivatives["logprobs"].values
    mask = to_batch(rows).mask.values
    assert np.abs(slopes[mask == 1]).max() > 0
    assert np.all(slopes[mask == 0] == 0)
