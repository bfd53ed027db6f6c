"""What the shim makes of a mini-batch, against SkyRL's own worker on the same rows: every policy
loss of SkyRL's registry, loss reduction, off-policy correction, KL estimator and knob, from SkyRL's
rows to the weights' gradient and the worker's metrics.

The gradient is what the mock's trainer holds; what it should be, torch's autograd through the
mock's policy under `PolicyWorkerBase._forward_backward_micro`, the mini-batch in one piece."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch, pad_training_input_batch
from skyrl.backends.skyrl_train.utils import ppo_utils
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry, reduce_loss
from skyrl.backends.skyrl_train.workers import worker_utils
from skyrl.train.config import AlgorithmConfig
from skyrl.train.config.config import OffPolicyCorrectionConfig
from skyrl_rows import LENGTHS, VOCABULARY, Mock, algorithm, random_rows, stock_step

from backends.mock import create
from remote_rl import connect, errors
from shims.skyrl.losses import ESTIMATORS, check_loss, is_named

TOLERANCE = 1e-5  # of the largest gradient
REDUCTIONS = (
    "token_mean",
    "token_mean_legacy",
    "sequence_mean",
    "seq_mean_token_sum_norm",
    "prompt_mean",
)
#: knobs that a loss reads, away from where they would do nothing; several where it has variants
KNOBS: dict[str, dict[str, dict[str, Any]]] = {
    "regular": {"": {"eps_clip_low": 0.1, "eps_clip_high": 0.3}},
    "dual_clip": {"": {"eps_clip_low": 0.1, "eps_clip_high": 0.3, "clip_ratio_c": 1.2}},
    "gspo": {"": {"eps_clip_low": 0.02, "eps_clip_high": 0.04}},
    "cispo": {
        anchor: {
            "cispo": {
                "cispo_eps_clip_low": 0.2,
                "cispo_eps_clip_high": 0.3,
                "cispo_anchor": anchor,
            }
        }
        for anchor in ("old", "rollout")
    },
    "sapo": {"": {"sapo": {"tau_pos": 1.3, "tau_neg": 2.0}}},
    "dppo": {
        kind: {"dppo": {"dppo_type": kind, "delta_low": low, "delta_high": high}}
        for kind, low, high in (("binary_tv", 0.02, 0.03), ("binary_kl", 0.002, 0.003))
    },
    "clip_cov": {"": {"clip_cov": {"clip_ratio": 0.3, "clip_cov_lb": -1.0, "clip_cov_ub": 2.0}}},
    "kl_cov": {"": {"kl_cov": {"kl_cov_frac": 0.3, "ppo_kl_coef": 0.7}}},
}
VARIANTS = [
    pytest.param({"policy_loss_type": name, **knobs}, id=f"{name}-{variant}" if variant else name)
    for name in sorted(PolicyLossRegistry.list_available())
    for variant, knobs in KNOBS.get(name, {"": {}}).items()
]
#: SkyRL's corrections, each away from where it would do nothing
CORRECTIONS: dict[str, dict[str, Any]] = {
    "token": {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.2},
    "sequence": {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.5},
    "geometric": {"sequence_mask_metric": "geometric", "geo_mask_low": 0.8, "geo_mask_high": 1.2},
    "product": {
        "sequence_mask_metric": "product",
        "product_mask_low": 0.5,
        "product_mask_high": 1.5,
    },
    "outlier": {"outlier_token_is_threshold_low": 0.6, "outlier_token_is_threshold_high": 2.5},
    "outlier-low": {"outlier_token_is_threshold_low": 0.6},
    "token-mask": {"token_mask_is_threshold_low": 0.7, "token_mask_is_threshold_high": 1.4},
    "all": {
        "tis_ratio_type": "token",
        "token_tis_ratio_clip_high": 1.2,
        "sequence_mask_metric": "geometric",
        "geo_mask_low": 0.7,
        "geo_mask_high": 1.3,
        "outlier_token_is_threshold_high": 3.0,
        "token_mask_is_threshold_low": 0.7,
        "token_mask_is_threshold_high": 1.4,
    },
}
DIFFERENCES = {
    f"{worker_utils.MINIBATCH_ROLLOUT_LOGPROB_DIFF_PREFIX}_{each}"
    for each in ("mean", "sq_mean", "max", "min")
}


@pytest.fixture(scope="module")
def mock() -> Iterator[Mock]:
    backend = create(vocab_size=VOCABULARY, initial_scale=1.0)
    with connect(backend) as session:
        yield Mock(session, backend)


def compare(
    mock: Mock,
    section: AlgorithmConfig,
    rows: TrainingInputBatch,
    *,
    seed: int = 11,
    moves: bool = True,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The shim's step and SkyRL's from the same random state: gradients and metrics agree; returns
    both metrics. moves: the gradient must not be zero."""
    torch.manual_seed(seed)
    found, gradient = mock.step(section, rows)
    torch.manual_seed(seed)
    wanted, stock = stock_step(section, mock.policy, rows)
    largest = max(np.abs(each).max() for each in stock.values())
    assert largest > 0 or not moves
    for name, each in stock.items():
        np.testing.assert_allclose(
            gradient[name], each, rtol=0, atol=TOLERANCE * largest, err_msg=name
        )
    missing = wanted.keys() - found.keys()
    if is_named(section, rows):
        assert missing <= DIFFERENCES | {"loss_metrics/cispo/ratio_clamped_mean"}
    else:
        assert not missing
    assert not found.keys() - wanted.keys()
    same(found, {name: wanted[name] for name in found})
    return found, wanted


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=TOLERANCE, abs=1e-6, nan_ok=True), name


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("loss", VARIANTS)
def test_every_policy_loss_of_the_registry(
    mock: Mock, loss: dict[str, Any], reduction: str
) -> None:
    rows = random_rows(mock.policy, loss_reduction=reduction)
    compare(mock, algorithm(loss_reduction=reduction, **loss), rows)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("loss", VARIANTS)
def test_every_off_policy_correction(mock: Mock, loss: dict[str, Any], correction: str) -> None:
    chosen = CORRECTIONS[correction]
    section = algorithm(off_policy_correction=chosen, use_kl_loss=True, **loss)
    if loss.get("cispo", {}).get("cispo_anchor") == "rollout" and "tis_ratio_type" in chosen:
        with pytest.raises(errors.UnsupportedError, match=r"tis_ratio_type=.*corrects by itself"):
            check_loss(section)
        return
    compare(mock, section, random_rows(mock.policy, random_seed=4))


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_the_corrections_here_do_something(mock: Mock, correction: str) -> None:
    rows = random_rows(mock.policy, random_seed=4)
    plain, _ = mock.step(algorithm(), rows)
    corrected, _ = mock.step(algorithm(off_policy_correction=CORRECTIONS[correction]), rows)
    assert corrected["policy_loss"] != pytest.approx(plain["policy_loss"], rel=1e-3)
    assert any(name.startswith("loss_metrics/is_ratio") for name in corrected)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("loss", ["regular", "gspo", "sapo"])
def test_every_kl_estimator(mock: Mock, loss: str, estimator: str) -> None:
    section = algorithm(
        policy_loss_type=loss, use_kl_loss=True, kl_loss_coef=0.7, kl_estimator_type=estimator
    )
    found, _ = compare(mock, section, random_rows(mock.policy, spread=0.8))
    assert found["policy_kl"] != 0


@pytest.mark.parametrize("loss", VARIANTS)
def test_kl_and_entropy_with_every_loss(mock: Mock, loss: dict[str, Any]) -> None:
    """The mean over all rows and the mean over tokens, beside a sum; none with cross_entropy."""
    terms = {
        "use_kl_loss": True,
        "kl_loss_coef": 0.3,
        "use_entropy_loss": True,
        "entropy_loss_coef": 0.2,
    }
    found, _ = compare(mock, algorithm(**terms, **loss), random_rows(mock.policy, spread=0.8))
    if loss["policy_loss_type"] == "cross_entropy":
        assert found.keys() == {"loss", "response_length", "lr"}
    else:
        wanted = found["policy_loss"] + 0.3 * found["policy_kl"] - 0.2 * found["policy_entropy"]
        assert found["final_loss"] == pytest.approx(wanted, rel=TOLERANCE)


@pytest.mark.parametrize("loss", VARIANTS)
def test_with_outputs_at_hand_no_metric_is_missing(mock: Mock, loss: dict[str, Any]) -> None:
    section = algorithm(use_kl_loss=True, off_policy_correction=CORRECTIONS["product"], **loss)
    rows = random_rows(mock.policy)
    torch.manual_seed(3)
    found, _ = mock.step(section, rows, known=True)
    torch.manual_seed(3)
    same(found, stock_step(section, mock.policy, rows)[0])


@pytest.mark.parametrize(
    "clip",
    [
        {"eps_clip_low": 0.0, "eps_clip_high": 0.0, "clip_ratio_c": 1.01},
        {"eps_clip_low": 0.5, "eps_clip_high": 0.01, "clip_ratio_c": 3.0},
        {"eps_clip_low": 1.5, "eps_clip_high": 9.0, "clip_ratio_c": 0.9},
        {"eps_clip_low": -0.1, "eps_clip_high": 0.3, "clip_ratio_c": 1.0},
    ],
)
@pytest.mark.parametrize("loss", ["regular", "dual_clip", "gspo", "clip_cov", "rollout_is"])
def test_clips(mock: Mock, loss: str, clip: dict[str, float]) -> None:
    section = algorithm(policy_loss_type=loss, **clip)
    rows = random_rows(mock.policy, spread=0.8, random_seed=5)
    compare(mock, section, rows, moves=False)
    low, dual = clip["eps_clip_low"] >= 0, loss != "dual_clip" or clip["clip_ratio_c"] > 1
    assert is_named(section, rows) == (low and dual and loss in ("regular", "dual_clip", "gspo"))


@pytest.mark.parametrize("loss", VARIANTS)
def test_log_ratios_beyond_skyrls_clamps(mock: Mock, loss: dict[str, Any]) -> None:
    wide = {"eps_clip_high": 1e9, "clip_ratio_c": 50.0}
    section = algorithm(use_kl_loss=True, **{**loss, **wide})
    rows = random_rows(mock.policy)
    # of whole rows, so that the mean ratio of a sequence lies beyond its clamp too
    offsets = torch.tensor([-25.0, 0.0, 25.0, -12.0, 0.0, 15.0, -3.0])[:, None]
    for name in ("action_log_probs", "base_action_log_probs", "rollout_logprobs"):
        rows[name] = rows[name] + offsets * rows["response_mask"]
    compare(mock, section, rows)


def test_an_unclamped_ratio_that_remote_rl_would_clamp_is_skyrls_own(mock: Mock) -> None:
    section = algorithm(policy_loss_type="importance_sampling")
    rows = random_rows(mock.policy)
    assert is_named(section, rows)
    row, token = (rows["loss_mask"] > 0).nonzero()[0]
    rows["action_log_probs"][row, token] = -52.0
    assert not is_named(section, rows)
    found, _ = compare(mock, section, rows)
    assert found["loss_metrics/importance_ratio"] > math.exp(44) / 30


@pytest.mark.parametrize("loss", VARIANTS)
def test_a_loss_mask_of_fractions_is_skyrls_own(mock: Mock, loss: dict[str, Any]) -> None:
    """A weight a token: SkyRL multiplies with it, and squares it in the KL."""
    section = algorithm(use_kl_loss=True, use_entropy_loss=True, kl_loss_coef=0.5, **loss)
    rows = random_rows(mock.policy)
    rows["loss_mask"] = rows["loss_mask"] * torch.linspace(0.25, 2.0, len(LENGTHS))[:, None]
    assert not is_named(section, rows)
    compare(mock, section, rows)


@pytest.mark.parametrize("loss", VARIANTS)
def test_padding_rows_of_step_wise_training(mock: Mock, loss: dict[str, Any]) -> None:
    """They count among the rows of the KL's mean, and nowhere else."""
    section = algorithm(use_kl_loss=True, kl_loss_coef=0.5, use_entropy_loss=True, **loss)
    rows = random_rows(mock.policy)
    alone, _ = compare(mock, section, rows)
    padded = pad_training_input_batch(rows, 3)
    assert padded.metadata["pad_size"] == 3
    found, _ = compare(mock, section, padded)
    if loss["policy_loss_type"] != "cross_entropy":
        share = len(LENGTHS) / (len(LENGTHS) + 3)
        assert found["policy_kl"] == pytest.approx(alone["policy_kl"] * share, rel=TOLERANCE)
        assert found["policy_entropy"] == pytest.approx(alone["policy_entropy"], rel=TOLERANCE)


@pytest.mark.parametrize("loss", VARIANTS)
def test_a_mini_batch_in_which_nothing_counts(mock: Mock, loss: dict[str, Any]) -> None:
    section = algorithm(use_kl_loss=True, use_entropy_loss=True, **loss)
    rows = random_rows(mock.policy, spread=0.0)
    rows["loss_mask"] = torch.zeros_like(rows["loss_mask"])
    compare(mock, section, rows, moves=False)


@pytest.mark.parametrize("loss", VARIANTS)
def test_rows_without_the_samplers_logprobs(mock: Mock, loss: dict[str, Any]) -> None:
    section = algorithm(**loss)
    rows = random_rows(mock.policy, rollout=False)
    assert rows.get("rollout_logprobs") is None
    if loss["policy_loss_type"] == "rollout_is":
        with pytest.raises(AssertionError, match="rollout_logprobs are required"):
            mock.step(section, rows)
    elif loss.get("cispo", {}).get("cispo_anchor") == "rollout":
        with pytest.raises(errors.InvalidRequestError, match=r"cispo_anchor='rollout' needs"):
            mock.step(section, rows)
    else:
        found, _ = compare(mock, section, rows)
        assert not DIFFERENCES & found.keys()


@pytest.mark.parametrize(
    "loss",
    [
        {"policy_loss_type": "rollout_is"},
        {"policy_loss_type": "dppo"},
        {"policy_loss_type": "cispo", "cispo": {"cispo_anchor": "rollout"}},
    ],
)
def test_losses_whose_old_logprobs_skyrl_never_computes(mock: Mock, loss: dict[str, Any]) -> None:
    rows = random_rows(mock.policy)
    rows["action_log_probs"] = None
    compare(mock, algorithm(**loss), rows)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    variant=st.sampled_from([each.values[0] for each in VARIANTS]),
    reduction=st.sampled_from(REDUCTIONS),
    correction=st.sampled_from((None, *CORRECTIONS)),
    estimator=st.sampled_from((None, *ESTIMATORS)),
    entropy=st.sampled_from((None, 0.0, 0.3)),
    lengths=st.lists(st.integers(0, 9), min_size=3, max_size=7).filter(any),
    temperature=st.sampled_from((0.7, 1.0, 1.3)),
    spread=st.sampled_from((0.3, 0.8, 2.0)),  # far above float32's rounding of a logprob
    seed=st.integers(0, 2**16),
)
def test_any_combination(
    mock: Mock,
    variant: dict[str, Any],
    reduction: str,
    correction: str | None,
    estimator: str | None,
    entropy: float | None,
    lengths: list[int],
    temperature: float,
    spread: float,
    seed: int,
) -> None:
    chosen: dict[str, Any] = {"loss_reduction": reduction, "temperature": temperature, **variant}
    if correction is not None and "cispo" not in variant:
        chosen["off_policy_correction"] = CORRECTIONS[correction]
    if estimator is not None:
        chosen |= {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_estimator_type": estimator}
    if entropy is not None:
        chosen |= {"use_entropy_loss": True, "entropy_loss_coef": entropy}
    rows = random_rows(
        mock.policy,
        random_seed=seed,
        lengths=tuple(lengths),
        spread=spread,
        temperature=temperature,
        loss_reduction=reduction,
    )
    compare(mock, algorithm(**chosen), rows, seed=seed, moves=False)


def test_this_file_knows_every_reduction_estimator_and_correction_of_skyrl() -> None:
    """What SkyRL adds fails here, by its name."""
    source = inspect.getsource(ppo_utils.apply_loss_reduction_to_advantages_minibatch)
    assert set(re.findall(r'loss_reduction == "(\w+)"', source)) == set(REDUCTIONS)
    source = inspect.getsource(ppo_utils.compute_approx_kl)
    assert set(re.findall(r'kl_estimator_type == "(\w+)"', source)) == set(ESTIMATORS)
    named = {name for chosen in CORRECTIONS.values() for name in chosen}
    assert named == set(OffPolicyCorrectionConfig.__dataclass_fields__)


def test_a_loss_that_the_user_registers_needs_no_code_of_the_shim(mock: Mock) -> None:
    section = algorithm(policy_loss_type="squared_ratio", use_kl_loss=True)
    with pytest.raises(errors.UnsupportedError, match=r"policy_loss_type='squared_ratio'.*gspo"):
        check_loss(section)

    @ppo_utils.register_policy_loss("squared_ratio")
    def squared_ratio(
        log_probs: Any,
        old_log_probs: Any,
        advantages: Any,
        config: Any,
        loss_mask: Any,
        rollout_logprobs: Any,
    ) -> Any:
        losses = -advantages * (2 * (log_probs - old_log_probs)).exp() * config.eps_clip_low
        return reduce_loss(losses, loss_mask), {"largest": losses.max().item()}

    try:
        check_loss(section)
        found, _ = compare(mock, section, random_rows(mock.policy))
        assert found["loss_metrics/largest"] > 0
    finally:
        PolicyLossRegistry.unregister("squared_ratio")


@pytest.mark.parametrize("name", ["regular", "cross_entropy"])
def test_a_loss_registered_under_a_name_of_skyrls_is_the_users(
    mock: Mock, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replacement(log_probs: Any, *_: Any, loss_mask: Any, **given: Any) -> Any:
        return reduce_loss(-3.0 * log_probs, loss_mask), {"clip_ratio": 0.5}

    section = algorithm(policy_loss_type=name, use_kl_loss=True)
    assert is_named(section)
    monkeypatch.setitem(PolicyLossRegistry._functions, name, replacement)
    assert not is_named(section)
    compare(mock, section, random_rows(mock.policy))


def test_skyrls_function_under_a_wrapper_of_the_user_is_the_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def logged(*arguments: Any, **given: Any) -> Any:
        return ppo_utils.ppo_policy_loss(*arguments, **given)

    monkeypatch.setitem(PolicyLossRegistry._functions, "regular", logged)
    assert not is_named(algorithm())


def test_what_skyrl_populates_its_registry_with_is_skyrls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PolicyLossRegistry, "_functions", {})
    PolicyLossRegistry.repopulate_registry()
    for name in ("regular", "dual_clip", "gspo", "cispo", "importance_sampling", "cross_entropy"):
        assert is_named(algorithm(policy_loss_type=name)), name


def test_a_loss_without_a_gradient_is_refused(mock: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    def constant(log_probs: Any, *_: Any, **given: Any) -> Any:
        return log_probs.detach().sum(), {}

    monkeypatch.setitem(PolicyLossRegistry._functions, "regular", constant)
    with pytest.raises(errors.InvalidRequestError, match="'regular' depends on no output"):
        mock.step(algorithm(), random_rows(mock.policy))
