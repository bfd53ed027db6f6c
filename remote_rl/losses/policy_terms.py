"""Losses: per-token policy terms and their derivatives (imports tokens).

Each function gives, for every token, the term before importance weight and aggregation, and its
derivative with respect to that token's logprob.
"""

from __future__ import annotations

from .base import Array
from .spec import CISPO, PPO, CrossEntropy, ImportanceSampling, Reinforce
from .tokens import Pending, PolicyTerm, Tokens, policy_ratio


def ppo(loss: PPO, tokens: Tokens) -> PolicyTerm:
    """max(-A r, -A clip(r)), and with dual_clip c the minimum of that and -A c where A < 0.

    d/dlogprob = -A dr/dlogprob where the first argument is chosen, 0 where the clipped one or the
    dual bound is, half where the dual bound is met exactly (as torch.minimum has it).
    """
    xp, advantages = tokens.xp, tokens.field("advantages")
    ratio = policy_ratio(tokens, loss.ratio, loss.log_ratio_clamp)
    unclipped = -advantages * ratio.value
    clipped = -advantages * tokens.clip(ratio.value, 1 - loss.clip_low, 1 + loss.clip_high)
    losses = xp.maximum(unclipped, clipped)
    zero = xp.zeros_like(losses)
    chosen = clipped > unclipped
    slopes = xp.where(chosen, zero, -advantages * ratio.slope)
    metrics = ratio.metrics | _clip_metrics(
        tokens, chosen & (advantages < 0), chosen & (advantages > 0)
    )
    if loss.dual_clip is not None:
        negative, bound = advantages < 0, -advantages * loss.dual_clip
        active = negative & (losses > bound)
        slopes = xp.where(active, zero, slopes)
        slopes = xp.where(negative & (losses == bound), slopes / 2, slopes)
        losses = xp.where(active, bound, losses)
        metrics["clip_fraction_dual"] = tokens.mean_metric(active)
    return PolicyTerm(losses, slopes, metrics)


def cispo(loss: CISPO, tokens: Tokens) -> PolicyTerm:
    """-constant(clip(r)) A logprob; d/dlogprob = -clip(r) A."""
    xp = tokens.xp
    ratio = policy_ratio(tokens, "token", loss.log_ratio_clamp)
    low = None if loss.clip_low is None else 1 - loss.clip_low
    high = None if loss.clip_high is None else 1 + loss.clip_high
    slopes = -tokens.clip(ratio.value, low, high) * tokens.field("advantages")
    nothing = xp.zeros_like(tokens.counted)
    below = nothing if low is None else ratio.value < low
    above = nothing if high is None else ratio.value > high
    metrics = ratio.metrics | _clip_metrics(tokens, below, above)
    return PolicyTerm(slopes * tokens.outputs["logprobs"], slopes, metrics)


def importance_sampling(loss: ImportanceSampling, tokens: Tokens) -> PolicyTerm:
    """-A r; d/dlogprob = -A dr/dlogprob."""
    advantages = tokens.field("advantages")
    ratio = policy_ratio(tokens, loss.ratio, loss.log_ratio_clamp)
    return PolicyTerm(-advantages * ratio.value, -advantages * ratio.slope, ratio.metrics)


def reinforce(_: Reinforce, tokens: Tokens) -> PolicyTerm:
    """-A logprob; d/dlogprob = -A."""
    advantages = tokens.field("advantages")
    return PolicyTerm(-advantages * tokens.outputs["logprobs"], -advantages, {})


def cross_entropy(_: CrossEntropy, tokens: Tokens) -> PolicyTerm:
    """-logprob; d/dlogprob = -1."""
    logprobs = tokens.outputs["logprobs"]
    return PolicyTerm(-logprobs, -tokens.xp.ones_like(logprobs), {})


def _clip_metrics(tokens: Tokens, below: Array, above: Array) -> dict[str, Pending]:
    return {
        "clip_fraction": tokens.mean_metric(below | above),
        "clip_fraction_low": tokens.mean_metric(below),
        "clip_fraction_high": tokens.mean_metric(above),
    }
