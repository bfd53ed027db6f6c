"""verl's loss configuration as a loss of remote_rl (the formulas: test_loss_parity.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from remote_rl import errors, losses
from shims.verl.losses import (
    build_aggregation,
    build_loss,
    check_loss,
    estimator,
    is_named,
)

ACTOR = "actor_rollout_ref.actor"


@pytest.fixture
def actor(config: Callable[..., Any]) -> Callable[..., Any]:
    """verl's actor section with overrides, without KL, counted by 20 tokens and 8 rows."""
    return lambda *overrides: (
        (
            config(f"{ACTOR}.use_kl_loss=false", *[f"{ACTOR}.{each}" for each in overrides])
        ).actor_rollout_ref.actor
    )


def build(section: Any, entropy: bool = False) -> Any:
    return build_loss(section, tokens=20, sequences=8, entropy=entropy)


def test_vanilla_is_ppo_with_verls_clip_values_and_clamp(actor: Callable[..., Any]) -> None:
    built = build(actor("clip_ratio_low=0.1", "clip_ratio_high=0.3", "clip_ratio_c=4.0"))
    assert built == losses.PPO(
        clip_low=0.1,
        clip_high=0.3,
        dual_clip=4.0,
        log_ratio_clamp=20,
        aggregation=losses.token_mean(20),
    )


def test_missing_asymmetric_clip_values_fall_back_to_clip_ratio(actor: Callable[..., Any]) -> None:
    built = build(actor("clip_ratio=0.15", "clip_ratio_low=null", "clip_ratio_high=null"))
    assert (built.clip_low, built.clip_high) == (0.15, 0.15)


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        ("gspo", losses.PPO(ratio="sequence", log_ratio_clamp=(None, 10))),
        ("cispo", losses.CISPO(log_ratio_clamp=20)),
        ("gpg", losses.Reinforce()),
    ],
)
def test_named_equivalents(actor: Callable[..., Any], mode: str, wanted: Any) -> None:
    built = build(actor(f"policy_loss.loss_mode={mode}"))
    assert built == wanted.resolved(20, 8)


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        ("token-mean", losses.token_mean(20)),
        ("token-sum", losses.sum()),
        ("seq-mean-token-sum", losses.sequence_mean_token_sum(8)),
        ("seq-mean-token-mean", losses.sequence_mean_token_mean(8)),
        ("seq-mean-token-sum-norm", losses.sequence_mean_token_sum_norm(6, 8)),
    ],
)
def test_aggregations_take_verls_own_denominators(
    actor: Callable[..., Any], mode: str, wanted: Any
) -> None:
    section = actor(f"loss_agg_mode={mode}", "loss_scale_factor=6")
    assert build_aggregation(section, tokens=20, sequences=8) == wanted


def test_a_mini_batch_without_counted_tokens_still_has_a_denominator(
    actor: Callable[..., Any],
) -> None:
    assert build_aggregation(actor(), tokens=0, sequences=8).denominator == 1


def test_kl_and_entropy_share_the_aggregation(config: Callable[..., Any]) -> None:
    section = config(
        f"{ACTOR}.kl_loss_type=k1+", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"
    ).actor_rollout_ref.actor
    built = build(section, entropy=True)
    aggregation = losses.sequence_mean_token_mean(8)
    assert built.kl == losses.KL(0.01, estimator="k1+", aggregation=aggregation)
    assert built.entropy == losses.Entropy(0.001, aggregation=aggregation)


def test_the_entropy_metric_comes_without_a_coefficient(actor: Callable[..., Any]) -> None:
    assert build(actor("entropy_coeff=0"), entropy=True).entropy.coef == 0
    assert build(actor("entropy_coeff=0"), entropy=False).entropy is None


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("kl", "k1"),
        ("k1", "k1"),
        ("kl+", "k1+"),
        ("abs", "abs"),
        ("abs+", "abs+"),
        ("mse", "k2"),
        ("k2", "k2"),
        ("k2+", "k2"),
        ("mse+", "k2"),
        ("low_var_kl", "k3"),
        ("low_var_kl+", "k3+"),
        ("k3+", "k3+"),
    ],
)
def test_kl_estimators(theirs: str, ours: str) -> None:
    assert estimator(theirs) == ours


def test_every_loss_of_verl_is_accepted(actor: Callable[..., Any]) -> None:
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    sections = [
        actor(f"policy_loss.loss_mode={mode}", "policy_loss.dro_beta=0.1")
        for mode in POLICY_LOSS_REGISTRY
    ]
    for section in sections:
        check_loss(section)
    named = {each.policy_loss.loss_mode for each in sections if is_named(each)}
    assert named == {"vanilla", "gspo", "cispo", "gpg"}


@pytest.mark.parametrize("beta", ["null", "0", "-1"])
def test_dro_without_its_penalty_is_refused(actor: Callable[..., Any], beta: str) -> None:
    with pytest.raises(errors.UnsupportedError, match=r"policy_loss\.dro_beta=.*positive"):
        check_loss(actor("policy_loss.loss_mode=dro", f"policy_loss.dro_beta={beta}"))


def test_a_loss_that_verl_does_not_know_is_refused(actor: Callable[..., Any]) -> None:
    with pytest.raises(errors.UnsupportedError, match=r"loss_mode='vanila'.*verl knows.*vanilla"):
        check_loss(actor("policy_loss.loss_mode=vanila"))
