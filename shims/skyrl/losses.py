"""Shim (loop side, above the client): SkyRL's policy loss as a named loss of remote_rl.

Imports remote_rl, and SkyRL's losses and off-policy correction to know its functions by identity.
The formulas stay where they are: SkyRL's `utils/ppo_utils.py` and its worker's
`_forward_backward_micro` say which configuration value enters where, `remote_rl.losses` computes
it. SkyRL has scaled the advantages by its loss reduction, so the policy term is a plain sum; KL and
entropy have the worker's denominators, with the whole mini-batch as one micro-batch. A named loss
serves only where it equals SkyRL's own function in every case; all others are that function, run
here (`own_losses`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.utils import off_policy_correction_utils, ppo_utils
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
from skyrl.train.config import AlgorithmConfig

from remote_rl import Batch, errors, losses
from remote_rl.losses import FormulaLoss

from ..common.rules import refuse
from .batches import counted, to_ragged

_ALGORITHM = "trainer.algorithm"

#: SkyRL's `kl_estimator_type`, which remote_rl calls the same, clamps included
ESTIMATORS = ("k1", "k2", "k3", "abs")

#: the losses whose function SkyRL's worker adds no KL and no entropy to
WITHOUT_TERMS = frozenset({"cross_entropy"})

#: `ImportanceSampling` clamps the log of a ratio at 44 in float32, SkyRL nowhere; no logprob is
#: above 0, so old logprobs from here on can't lead there
_LOWEST_UNCLAMPED = -44.0


def is_named(algorithm: AlgorithmConfig, rows: TrainingInputBatch | None = None) -> bool:
    """Whether remote_rl has this `policy_loss_type` by name: SkyRL's own function of that name, not
    one that the user registered in its place, with knobs that the named loss knows.

    rows: of a mini-batch, whose values may rule it out too: a `loss_mask` that is not 0 and 1, or
    with importance_sampling an old logprob below -44. Without them, what holds for all others.
    """
    served = _NAMED.get(algorithm.policy_loss_type)
    if served is None or not _is_skyrls(algorithm.policy_loss_type, served.function):
        return False
    return served.has_knobs(algorithm) and (rows is None or _has_values(algorithm, rows))


def build_loss(
    algorithm: AlgorithmConfig, rows: TrainingInputBatch, batch: Batch
) -> tuple[FormulaLoss, Batch]:
    """The named loss of one mini-batch, and the batch that it is to be evaluated on: `batch` with
    SkyRL's off-policy correction as `importance_weights`, and with cispo's rollout anchor the
    sampler's logprobs as `old_logprobs`.

    rows: SkyRL's. batch: of the rows, for training. Raises `InvalidRequestError` where `is_named`
    with these rows is False, or a field that the loss needs is missing.
    """
    if not is_named(algorithm, rows):
        raise errors.InvalidRequestError(
            f"{_ALGORITHM}.policy_loss_type={algorithm.policy_loss_type!r} has no exact named form "
            "for these rows; evaluate SkyRL's own function on the outputs (own_losses)"
        )
    served = _NAMED[algorithm.policy_loss_type]
    terms: dict[str, Any] = {"aggregation": losses.sum()}
    if algorithm.policy_loss_type not in WITHOUT_TERMS:
        terms |= _terms(algorithm, rows)
    changed: dict[str, Any] = {}
    correction = off_policy_correction(algorithm, rows)
    if correction is not None:
        changed["importance_weights"] = to_ragged(rows, "importance weights", correction.weights)
    if algorithm.policy_loss_type == "cispo" and algorithm.cispo.cispo_anchor == "rollout":
        if batch.sampling_logprobs is None:
            raise errors.InvalidRequestError(
                f"{_ALGORITHM}.cispo.cispo_anchor='rollout' needs the sampler's logprobs, and "
                "these rows have no rollout_logprobs; set generator.sampling_params.logprobs=1",
                field="rollout_logprobs",
            )
        changed["old_logprobs"] = batch.sampling_logprobs
    return served.build(algorithm, terms), batch.replace(**changed) if changed else batch


def loss_kinds(algorithm: AlgorithmConfig) -> tuple[str, ...]:
    """The names in `Capabilities.losses` that a training may need: Cotangents always, since a
    mini-batch's values can rule the named loss out."""
    if not is_named(algorithm):
        return ("Cotangents",)
    built = _NAMED[algorithm.policy_loss_type].build(algorithm, {"aggregation": losses.sum()})
    return (type(built).__name__, "Cotangents")


def check_loss(algorithm: AlgorithmConfig) -> None:
    """Refuses at start-up, by its key, what neither remote_rl nor SkyRL's registry knows."""
    name = algorithm.policy_loss_type
    known = sorted(PolicyLossRegistry.list_available())
    if name not in known:
        refuse(f"{_ALGORITHM}.policy_loss_type", name, f"SkyRL knows {', '.join(known)}")
    if algorithm.kl_estimator_type not in ESTIMATORS:
        because = f"the known ones are {', '.join(ESTIMATORS)}"
        refuse(f"{_ALGORITHM}.kl_estimator_type", algorithm.kl_estimator_type, because)
    ratio = algorithm.off_policy_correction.tis_ratio_type
    if name == "cispo" and algorithm.cispo.cispo_anchor == "rollout" and ratio is not None:
        refuse(
            f"{_ALGORITHM}.off_policy_correction.tis_ratio_type",
            ratio,
            "SkyRL's cispo with cispo_anchor='rollout' corrects by itself; set it to null",
        )


@attrs.frozen(eq=False)
class Correction:
    """weights: [B, A], what SkyRL multiplies each token's policy loss with, masks included.
    metrics: by SkyRL's names."""

    weights: torch.Tensor
    metrics: Mapping[str, float]


def off_policy_correction(
    algorithm: AlgorithmConfig, rows: TrainingInputBatch
) -> Correction | None:
    """SkyRL's own correction in a loss that remote_rl has by name, a function of old and sampling
    logprobs alone; None where it is off, the sampler gave no logprobs, or SkyRL's function of that
    name corrects nothing."""
    settings, sampled = algorithm.off_policy_correction, rows.get("rollout_logprobs")
    served = _NAMED.get(algorithm.policy_loss_type)
    if served is None or not served.corrected or sampled is None:
        return None
    if not off_policy_correction_utils.off_policy_correction_enabled(settings):
        return None
    if rows.get("action_log_probs") is None:
        raise errors.InvalidRequestError(
            f"{_ALGORITHM}.off_policy_correction compares old logprobs with the sampler's, and "
            "these rows have no action_log_probs",
            field="action_log_probs",
        )
    ratio, metrics, mask = off_policy_correction_utils.compute_off_policy_correction(
        rows["action_log_probs"], sampled, rows["loss_mask"], settings
    )
    return Correction(mask if ratio is None else ratio * mask, metrics)


def _terms(algorithm: AlgorithmConfig, rows: TrainingInputBatch) -> dict[str, Any]:
    # entropy also with coefficient 0: SkyRL's worker reports it in any case
    tokens = max(int(counted(rows).sum()), 1)
    coefficient = algorithm.entropy_loss_coef if algorithm.use_entropy_loss else 0.0
    terms: dict[str, Any] = {
        "entropy": losses.Entropy(coefficient, aggregation=losses.token_mean(tokens))
    }
    if algorithm.use_kl_loss:
        # the mean over all rows, those without a counted token included
        aggregation = losses.sequence_mean_token_mean(rows.batch_size)
        terms["kl"] = losses.KL(
            algorithm.kl_loss_coef,
            estimator=algorithm.kl_estimator_type,
            aggregation=aggregation,
        )
    return terms


@attrs.frozen
class _Named:
    """One of SkyRL's losses that remote_rl has by name.

    function: SkyRL's. build: from the configuration and the common arguments. has_knobs: whether
    the named loss takes the configured values. corrected: the function applies SkyRL's off-policy
    correction.
    """

    function: Callable[..., Any]
    build: Callable[[AlgorithmConfig, dict[str, Any]], FormulaLoss]
    has_knobs: Callable[[AlgorithmConfig], bool] = lambda _: True
    corrected: bool = False


def _clip(algorithm: AlgorithmConfig) -> dict[str, Any]:
    return {"clip_low": algorithm.eps_clip_low, "clip_high": algorithm.eps_clip_high}


def _has_clip(algorithm: AlgorithmConfig) -> bool:
    return bool(algorithm.eps_clip_low >= 0 and algorithm.eps_clip_high >= 0)


def _has_dual_clip(algorithm: AlgorithmConfig) -> bool:
    return _has_clip(algorithm) and algorithm.clip_ratio_c > 1


def _has_cispo_clip(algorithm: AlgorithmConfig) -> bool:
    section = algorithm.cispo
    return bool(section.cispo_eps_clip_low >= 0 and section.cispo_eps_clip_high >= 0)


def _regular(algorithm: AlgorithmConfig, terms: dict[str, Any]) -> FormulaLoss:
    return losses.PPO(**_clip(algorithm), log_ratio_clamp=20, **terms)


def _dual_clip(algorithm: AlgorithmConfig, terms: dict[str, Any]) -> FormulaLoss:
    dual_clip = algorithm.clip_ratio_c
    return losses.PPO(**_clip(algorithm), dual_clip=dual_clip, log_ratio_clamp=20, **terms)


def _gspo(algorithm: AlgorithmConfig, terms: dict[str, Any]) -> FormulaLoss:
    return losses.PPO(**_clip(algorithm), ratio="sequence", log_ratio_clamp=(None, 10), **terms)


def _cispo(algorithm: AlgorithmConfig, terms: dict[str, Any]) -> FormulaLoss:
    return losses.CISPO(
        clip_low=algorithm.cispo.cispo_eps_clip_low,
        clip_high=algorithm.cispo.cispo_eps_clip_high,
        log_ratio_clamp=20,
        **terms,
    )


def _importance_sampling(_: AlgorithmConfig, terms: dict[str, Any]) -> FormulaLoss:
    return losses.ImportanceSampling(log_ratio_clamp=None, **terms)


def _cross_entropy(_: AlgorithmConfig, terms: dict[str, Any]) -> FormulaLoss:
    return losses.CrossEntropy(**terms)


_NAMED: Mapping[str, _Named] = {
    "regular": _Named(ppo_utils.ppo_policy_loss, _regular, _has_clip, corrected=True),
    "dual_clip": _Named(ppo_utils.ppo_policy_loss, _dual_clip, _has_dual_clip, corrected=True),
    "gspo": _Named(ppo_utils.gspo_policy_loss, _gspo, _has_clip, corrected=True),
    "cispo": _Named(ppo_utils.compute_policy_loss_cispo, _cispo, _has_cispo_clip, corrected=True),
    "importance_sampling": _Named(ppo_utils.importance_sampling_loss, _importance_sampling),
    "cross_entropy": _Named(ppo_utils.cross_entropy_loss, _cross_entropy),
}


def _is_skyrls(name: str, function: Callable[..., Any]) -> bool:
    # SkyRL's decorator registers a wrapper, and its repopulation what the module's name then holds
    return name in PolicyLossRegistry.list_available() and any(
        PolicyLossRegistry.get(name) is each for each in _wrapped(function)
    )


def _wrapped(function: Any) -> Iterator[Any]:
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _has_values(algorithm: AlgorithmConfig, rows: TrainingInputBatch) -> bool:
    mask = rows["loss_mask"]
    if not bool(((mask == 0) | (mask == 1)).all()):
        return False
    old = rows.get("action_log_probs")
    if algorithm.policy_loss_type != "importance_sampling" or old is None:
        return True
    return bool((old[counted(rows)] >= _LOWEST_UNCLAMPED).all())
