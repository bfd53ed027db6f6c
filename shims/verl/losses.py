"""Shim (loop side, above the client): verl's loss configuration as a named loss of remote_rl.

Imports remote_rl, and verl's registry of losses to know the names. The formulas stay where they
are: verl's `workers/utils/losses.py::ppo_loss` and `trainer/ppo/core_algos.py` say which
configuration value enters where, `remote_rl.losses` computes it. Losses without a name here are
verl's own functions (`own_losses`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from verl.trainer.ppo import core_algos
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

from remote_rl import errors, losses
from remote_rl.losses import Aggregation, FormulaLoss

_ACTOR = "actor_rollout_ref.actor"

#: verl's `loss_agg_mode` -> (kind of aggregation, what its denominator is)
_AGGREGATIONS: Mapping[str, tuple[str, str | None]] = {
    "token-mean": ("token_mean", "tokens"),
    "token-sum": ("sum", None),
    "seq-mean-token-sum": ("sequence_mean_token_sum", "sequences"),
    "seq-mean-token-mean": ("sequence_mean_token_mean", "sequences"),
    "seq-mean-token-sum-norm": ("sequence_mean_token_sum_norm", "sequences"),
}

#: verl's `kl_loss_type` without its "+" -> estimator
_ESTIMATORS: Mapping[str, str] = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
}


def build_loss(actor: Any, *, tokens: int, sequences: int, entropy: bool) -> FormulaLoss:
    """The loss of one mini-batch.

    actor: verl's actor configuration (OmegaConf node or dataclass). tokens, sequences: verl's
    `batch_num_tokens` (loss_mask summed) and `global_batch_size` (rows, padding rows included) of
    the mini-batch. entropy: verl's `calculate_entropy`; with coefficient 0 only the metric.
    """
    aggregation = build_aggregation(actor, tokens=tokens, sequences=sequences)
    terms: dict[str, Any] = {"aggregation": aggregation}
    if actor.use_kl_loss:
        terms["kl"] = losses.KL(
            actor.kl_loss_coef, estimator=estimator(actor.kl_loss_type), aggregation=aggregation
        )
    if entropy:
        terms["entropy"] = losses.Entropy(actor.entropy_coeff, aggregation=aggregation)
    return _POLICY_TERMS[actor.policy_loss.loss_mode](actor, terms)


def is_named(actor: Any) -> bool:
    """Whether remote_rl has this `policy_loss.loss_mode` by name: verl's own function of that name,
    not one that the user registered in its place."""
    mode = actor.policy_loss.loss_mode
    function = POLICY_LOSS_REGISTRY.get(mode)
    return mode in _POLICY_TERMS and getattr(function, "__module__", "") == core_algos.__name__


def check_loss(actor: Any) -> None:
    """Refuses, by its key, what neither remote_rl nor verl's registry knows."""
    mode = actor.policy_loss.loss_mode
    if not is_named(actor) and mode not in POLICY_LOSS_REGISTRY:
        known = ", ".join(sorted({*_POLICY_TERMS, *POLICY_LOSS_REGISTRY}))
        _refuse("policy_loss.loss_mode", mode, f"verl knows {known}")
    beta = actor.policy_loss.get("dro_beta")
    if mode == "dro" and (beta is None or beta <= 0):
        _refuse("policy_loss.dro_beta", beta, "verl's dro needs a positive one")
    build_aggregation(actor, tokens=1, sequences=1)
    estimator(actor.kl_loss_type)


def build_aggregation(actor: Any, *, tokens: int, sequences: int) -> Aggregation:
    """verl's `agg_loss` with the denominators of the whole mini-batch."""
    mode = actor.loss_agg_mode
    if mode not in _AGGREGATIONS:
        _refuse("loss_agg_mode", mode, f"the known ones are {', '.join(_AGGREGATIONS)}")
    kind, counted = _AGGREGATIONS[mode]
    arguments: dict[str, Any] = {"kind": kind}
    if counted is not None:
        arguments["denominator"] = max(tokens if counted == "tokens" else sequences, 1)
    if kind == "sequence_mean_token_sum_norm":
        if actor.loss_scale_factor is None:
            _refuse(
                "loss_scale_factor",
                None,
                f"with loss_agg_mode={mode} verl then divides by the longest response of each "
                "micro-batch, which no two engines agree on; set it, e.g. to "
                "data.max_response_length",
            )
        arguments["width"] = actor.loss_scale_factor
    return Aggregation(**arguments)


def estimator(kl_loss_type: str) -> Any:
    """remote_rl's name of verl's `kl_loss_type`."""
    base, plus = kl_loss_type.removesuffix("+"), kl_loss_type.endswith("+")
    if base not in _ESTIMATORS:
        _refuse("kl_loss_type", kl_loss_type, f"the known ones are {', '.join(_ESTIMATORS)}")
    name = _ESTIMATORS[base]
    return f"{name}+" if plus and name != "k2" else name  # verl's k2+ is k2


def _clip(actor: Any) -> dict[str, Any]:
    low, high = actor.clip_ratio_low, actor.clip_ratio_high
    return {
        "clip_low": actor.clip_ratio if low is None else low,
        "clip_high": actor.clip_ratio if high is None else high,
    }


def _vanilla(actor: Any, terms: dict[str, Any]) -> FormulaLoss:
    return losses.PPO(**_clip(actor), dual_clip=actor.clip_ratio_c, log_ratio_clamp=20, **terms)


def _gspo(actor: Any, terms: dict[str, Any]) -> FormulaLoss:
    return losses.PPO(**_clip(actor), ratio="sequence", log_ratio_clamp=(None, 10), **terms)


def _cispo(actor: Any, terms: dict[str, Any]) -> FormulaLoss:
    return losses.CISPO(**_clip(actor), log_ratio_clamp=20, **terms)


def _gpg(_: Any, terms: dict[str, Any]) -> FormulaLoss:
    return losses.Reinforce(**terms)


_POLICY_TERMS: Mapping[str, Callable[[Any, dict[str, Any]], FormulaLoss]] = {
    "vanilla": _vanilla,
    "gspo": _gspo,
    "cispo": _cispo,
    "gpg": _gpg,
}


def _refuse(key: str, value: Any, because: str) -> None:
    raise errors.UnsupportedError(
        f"{_ACTOR}.{key}={value!r} is not supported: {because}", key=f"{_ACTOR}.{key}"
    )
