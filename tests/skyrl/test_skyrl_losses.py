"""SkyRL's loss configuration as a named loss of remote_rl (the numbers: test_skyrl_parity.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
from skyrl_rows import algorithm, skyrl_rows

from remote_rl import Batch, errors, losses
from shims.skyrl.batches import to_batch
from shims.skyrl.losses import build_loss, check_loss, is_named, off_policy_correction
from shims.skyrl.own_losses import evaluate_own_loss, needed_outputs

#: five counted tokens in four rows
MASKS = [[1.0, 0.0, 1.0], [0.0], [1.0, 1.0], [1.0]]
VALUES = [[-1.0, -1.5, -2.0], [-2.5], [-3.0, -3.5], [-0.5]]
SAMPLED = [[-1.0, -1.5, -3.0], [-2.5], [-2.0, -3.5], [-0.5]]
ENTROPY = losses.Entropy(0.0, aggregation=losses.token_mean(5))


def rows(**replaced: Any) -> TrainingInputBatch:
    columns = {
        "advantages": VALUES,
        "action_log_probs": VALUES,
        "base_action_log_probs": VALUES,
        "rollout_logprobs": SAMPLED,
        **replaced,
    }
    return skyrl_rows([[2]] * 4, [[5] * len(row) for row in MASKS], MASKS, **columns)


def built(data: TrainingInputBatch | None = None, **settings: Any) -> tuple[Any, Batch]:
    data = rows() if data is None else data
    batch = to_batch(data, temperature=1.0, training=True)
    return build_loss(algorithm(**settings), data, batch)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (
            {"eps_clip_low": 0.1, "eps_clip_high": 0.3},
            losses.PPO(clip_low=0.1, clip_high=0.3, log_ratio_clamp=20),
        ),
        (
            {"policy_loss_type": "dual_clip", "clip_ratio_c": 4.0},
            losses.PPO(dual_clip=4.0, log_ratio_clamp=20),
        ),
        (
            {"policy_loss_type": "gspo"},
            losses.PPO(ratio="sequence", log_ratio_clamp=(None, 10)),
        ),
        (
            {"policy_loss_type": "cispo"},
            losses.CISPO(clip_low=1.0, clip_high=4.0, log_ratio_clamp=20),
        ),
        (
            {"policy_loss_type": "importance_sampling"},
            losses.ImportanceSampling(log_ratio_clamp=None),
        ),
    ],
)
def test_named_equivalents_sum_what_skyrl_has_scaled(settings: Any, wanted: Any) -> None:
    loss, _ = built(**settings)
    assert loss.aggregation == losses.sum()
    assert loss == type(wanted)(**{**_fields(wanted), "aggregation": "sum", "entropy": ENTROPY})


def _fields(loss: Any) -> dict[str, Any]:
    names = ("clip_low", "clip_high", "dual_clip", "ratio", "log_ratio_clamp")
    return {name: getattr(loss, name) for name in names if hasattr(loss, name)}


def test_cross_entropy_has_no_further_terms() -> None:
    loss, _ = built(policy_loss_type="cross_entropy", use_kl_loss=True, use_entropy_loss=True)
    assert loss == losses.CrossEntropy(aggregation="sum")


def test_kl_is_the_mean_over_all_rows_and_entropy_over_counted_tokens() -> None:
    loss, _ = built(
        use_kl_loss=True,
        kl_loss_coef=0.3,
        kl_estimator_type="k2",
        use_entropy_loss=True,
        entropy_loss_coef=0.2,
    )
    assert loss.kl == losses.KL(0.3, estimator="k2", aggregation=losses.sequence_mean_token_mean(4))
    assert loss.entropy == losses.Entropy(0.2, aggregation=losses.token_mean(5))


def test_a_mini_batch_without_counted_tokens_still_has_a_denominator() -> None:
    data = rows()
    data["loss_mask"] = torch.zeros_like(data["loss_mask"])
    loss, _ = built(data)
    assert loss.entropy.aggregation.denominator == 1


def test_an_off_policy_correction_becomes_importance_weights() -> None:
    """Old minus sampling logprobs of the counted tokens: 0, 1 | | -1, 0 | 0."""
    correction = {
        "tis_ratio_type": "token",
        "token_tis_ratio_clip_high": 2.0,
        "token_mask_is_threshold_low": 0.5,
        "token_mask_is_threshold_high": 10.0,
    }
    _, batch = built(off_policy_correction=correction)
    assert batch.importance_weights is not None
    assert batch.importance_weights.to_rows() == [[1, 0, 2], [0], [0, 1], [1]]
    assert batch.mask.to_rows() == [[1, 0, 1], [0], [1, 1], [1]]  # denominators stay


@pytest.mark.parametrize("loss", ["importance_sampling", "cross_entropy"])
def test_losses_that_skyrl_does_not_correct_have_no_weights(loss: str) -> None:
    correction = {"tis_ratio_type": "token"}
    _, batch = built(policy_loss_type=loss, off_policy_correction=correction)
    assert batch.importance_weights is None


def test_no_correction_leaves_the_batch_alone() -> None:
    data = rows()
    batch = to_batch(data, temperature=1.0, training=True)
    assert build_loss(algorithm(), data, batch)[1] is batch
    data["rollout_logprobs"] = None
    batch = to_batch(data, temperature=1.0, training=True)
    corrected = algorithm(off_policy_correction={"tis_ratio_type": "token"})
    assert build_loss(corrected, data, batch)[1] is batch  # as SkyRL, without the sampler's


def test_a_correction_without_old_logprobs_is_refused() -> None:
    data = rows()
    data["action_log_probs"] = None
    section = algorithm(off_policy_correction={"sequence_mask_metric": "product"})
    with pytest.raises(errors.InvalidRequestError, match="no action_log_probs"):
        off_policy_correction(section, data)


def test_the_rollout_anchor_of_cispo_is_the_samplers_logprobs() -> None:
    data = rows()
    data["action_log_probs"] = None
    _, batch = built(data, policy_loss_type="cispo", cispo={"cispo_anchor": "rollout"})
    assert batch.old_logprobs is not None
    assert batch.old_logprobs.to_rows() == SAMPLED


def test_which_losses_are_named() -> None:
    names = PolicyLossRegistry.list_available()
    for name in names:
        check_loss(algorithm(policy_loss_type=name))
    named = {name for name in names if is_named(algorithm(policy_loss_type=name))}
    assert named == {
        "regular",
        "dual_clip",
        "gspo",
        "cispo",
        "importance_sampling",
        "cross_entropy",
    }


@pytest.mark.parametrize(
    "settings",
    [
        {"eps_clip_low": -0.1},
        {"policy_loss_type": "gspo", "eps_clip_high": -0.1},
        {"policy_loss_type": "dual_clip", "clip_ratio_c": 1.0},
        {"policy_loss_type": "cispo", "cispo": {"cispo_eps_clip_low": -0.1}},
    ],
)
def test_knobs_that_the_named_loss_lacks_are_left_to_skyrls_own(settings: Any) -> None:
    assert not is_named(algorithm(**settings))


def test_rows_that_rule_a_named_loss_out_cannot_be_built() -> None:
    data = rows()
    data["loss_mask"] = data["loss_mask"] * 0.5
    assert is_named(algorithm())
    assert not is_named(algorithm(), data)
    with pytest.raises(errors.InvalidRequestError, match="'regular' has no exact named form"):
        built(data)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy_loss_type": "regulr"}, r"policy_loss_type='regulr'.*regular"),
        ({"kl_estimator_type": "k4"}, r"kl_estimator_type='k4'.*k1, k2, k3, abs"),
        (
            {
                "policy_loss_type": "cispo",
                "cispo": {"cispo_anchor": "rollout"},
                "off_policy_correction": {"tis_ratio_type": "sequence"},
            },
            r"off_policy_correction\.tis_ratio_type='sequence'",
        ),
    ],
)
def test_what_skyrl_does_not_know_is_refused_at_start_up(settings: Any, message: str) -> None:
    with pytest.raises(errors.UnsupportedError, match=rf"trainer\.algorithm\.{message}"):
        check_loss(algorithm(**settings))


def test_a_named_loss_without_the_references_logprobs_is_refused() -> None:
    data = rows()
    data["base_action_log_probs"] = None
    loss, batch = built(data, use_kl_loss=True)
    with pytest.raises(errors.InvalidRequestError, match="ref_logprobs"):
        loss.check(batch)


def test_an_own_loss_without_the_references_logprobs_is_refused() -> None:
    data = rows()
    data["base_action_log_probs"] = None
    section = algorithm(policy_loss_type="sapo", use_kl_loss=True)
    outputs: Any = None  # not reached
    with pytest.raises(errors.InvalidRequestError, match="no base_action_log_probs"):
        evaluate_own_loss(section, data, outputs)


def test_entropy_is_computed_also_where_it_is_only_reported() -> None:
    assert needed_outputs(algorithm(policy_loss_type="sapo")) == {"logprobs", "entropy"}
    assert needed_outputs(algorithm(policy_loss_type="cross_entropy")) == {"logprobs"}
