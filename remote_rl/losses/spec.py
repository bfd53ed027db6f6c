"""Losses: the losses with a formula, as data (imports attrs, remote_rl.types.fields).

All are minimised. With r = exp(logprob - old_logprob), A = advantage, and w = importance weight (1
where the batch has none), each gives a per-token policy term, and

    loss = scale x (aggregate(w x policy) + kl.coef x aggregate(kl) - entropy.coef x aggregate(H))

each `aggregate` with its own aggregation. Only tokens with mask 1 enter anywhere.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

import attrs

from ..types.fields import SEMANTIC, instance_of, number, one_of, optional, plain, strict
from .aggregation import Aggregation, as_aggregation
from .base import Bounds, Loss, as_bounds, check_bounds
from .terms import KL, TOKEN_MEAN, Entropy, is_aggregation

RatioKind = Literal["token", "sequence"]
RATIO_KINDS: tuple[RatioKind, ...] = ("token", "sequence")


_AT_LEAST_ZERO = number(minimum=0)
_CLAMP: Bounds = (-20.0, 20.0)


@attrs.frozen(kw_only=True)
class FormulaLoss(Loss):
    """Base of the losses that `evaluate` computes: a policy term, and what they all can add.

    aggregation: of the policy term. kl, entropy: further terms, None for none. scale: multiplies
    the whole loss, e.g. 1 / number of accumulated batches.
    """

    fields_read: ClassVar[frozenset[str]] = frozenset()

    aggregation: Aggregation = attrs.field(
        default=TOKEN_MEAN,
        metadata=SEMANTIC,
        converter=as_aggregation,
        validator=is_aggregation,
    )
    kl: KL | None = attrs.field(
        default=None, metadata=SEMANTIC, validator=optional(instance_of(KL, wanted="a losses.KL"))
    )
    entropy: Entropy | None = attrs.field(
        default=None,
        metadata=SEMANTIC,
        validator=optional(instance_of(Entropy, wanted="a losses.Entropy")),
    )
    scale: float = attrs.field(default=1.0, metadata=SEMANTIC, converter=plain, validator=number())

    @property
    def required_fields(self) -> frozenset[str]:
        """Names of the Batch fields that must be there."""
        return self.fields_read | ({"ref_logprobs"} if self.kl is not None else frozenset())

    @property
    def optional_fields(self) -> frozenset[str]:
        """`importance_weights`, which multiply the policy term."""
        return frozenset({"importance_weights"})

    @property
    def required_outputs(self) -> frozenset[str]:
        """`logprobs`, and `entropy` where the loss has that term."""
        return frozenset({"logprobs"} | ({"entropy"} if self.entropy is not None else set()))

    def resolved(self, tokens: int, sequences: int) -> Self:
        """The loss with the open denominators of all its terms filled in."""

        def filled(term: Any) -> Any:
            if term is None:
                return None
            aggregation = term.aggregation.resolved(tokens, sequences)
            return attrs.evolve(term, aggregation=aggregation)

        whole: Self = attrs.evolve(filled(self), kl=filled(self.kl), entropy=filled(self.entropy))
        return whole


@strict
@attrs.frozen(kw_only=True)
class PPO(FormulaLoss):
    """Clipped surrogate (arXiv:1707.06347): max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)).

    clip_low, clip_high: asymmetric as in DAPO (arXiv:2503.14476).
    dual_clip: None, or c > 1: where A < 0, the minimum of the above and -A c (arXiv:1912.09729).
    ratio: "token", or "sequence" for GSPO (arXiv:2507.18071): every token's r is
        s = exp(mean over the row's counted tokens of logprob - old_logprob), and its derivative is
        taken as GSPO-token's (same paper): d s / d logprob_t = s at the token itself. That is the
        sequence objective's own gradient wherever w x A is constant in the row and the
        aggregation is sequence_mean_token_mean.
    log_ratio_clamp: bounds of the log of the ratio, after the mean: a number c for (-c, c), a pair,
        or None; derivative 0 beyond. However given, exponents above 44 in float32 (354 in float64)
        are clamped there, so that nothing overflows.

    Derivatives at corners are those torch's autograd gives the formula: the full one at the edge of
    the clip range, half at exactly r = dual_clip.

    verl's `vanilla`: PPO(clip_low, clip_high, dual_clip=clip_ratio_c, log_ratio_clamp=20).
    verl's and SkyRL's `gspo`: PPO(ratio="sequence", log_ratio_clamp=(None, 10)).
    SkyRL's `regular` and `dual_clip`: PPO(aggregation="sum"), without or with dual_clip.
    """

    name: ClassVar[str] = "ppo"
    fields_read: ClassVar[frozenset[str]] = frozenset({"advantages", "old_logprobs"})

    clip_low: float = attrs.field(
        default=0.2, metadata=SEMANTIC, converter=plain, validator=_AT_LEAST_ZERO
    )
    clip_high: float = attrs.field(
        default=0.2, metadata=SEMANTIC, converter=plain, validator=_AT_LEAST_ZERO
    )
    dual_clip: float | None = attrs.field(
        default=None, metadata=SEMANTIC, converter=plain, validator=optional(number(above=1))
    )
    ratio: RatioKind = attrs.field(
        default="token", metadata=SEMANTIC, validator=one_of(RATIO_KINDS)
    )
    log_ratio_clamp: Bounds | None = attrs.field(
        default=_CLAMP, metadata=SEMANTIC, converter=as_bounds, validator=check_bounds
    )


@strict
@attrs.frozen(kw_only=True)
class CISPO(FormulaLoss):
    """Clipped importance weight (arXiv:2506.13585): -constant(clip(r)) A logprob.

    The clipped ratio is a constant of the derivative, so no token is dropped from the gradient.
    clip_low, clip_high: r is clipped to [1 - clip_low, 1 + clip_high]; None leaves a side open.
    log_ratio_clamp: as in PPO, here only to keep the exponential finite.

    verl's and SkyRL's `cispo` map by these names (SkyRL's cispo_anchor="rollout": give the
    sampler's logprobs as `old_logprobs`).
    """

    name: ClassVar[str] = "cispo"
    fields_read: ClassVar[frozenset[str]] = frozenset({"advantages", "old_logprobs"})

    clip_low: float | None = attrs.field(
        default=0.2, metadata=SEMANTIC, converter=plain, validator=optional(_AT_LEAST_ZERO)
    )
    clip_high: float | None = attrs.field(
        default=0.2, metadata=SEMANTIC, converter=plain, validator=optional(_AT_LEAST_ZERO)
    )
    log_ratio_clamp: Bounds | None = attrs.field(
        default=_CLAMP, metadata=SEMANTIC, converter=as_bounds, validator=check_bounds
    )


@strict
@attrs.frozen(kw_only=True)
class ImportanceSampling(FormulaLoss):
    """Policy gradient with an importance ratio, unclipped: -A r.

    ratio, log_ratio_clamp: as in PPO. SkyRL's and Tinker's `importance_sampling`:
    ImportanceSampling(aggregation="sum", log_ratio_clamp=None).
    """

    name: ClassVar[str] = "importance_sampling"
    fields_read: ClassVar[frozenset[str]] = frozenset({"advantages", "old_logprobs"})

    ratio: RatioKind = attrs.field(
        default="token", metadata=SEMANTIC, validator=one_of(RATIO_KINDS)
    )
    log_ratio_clamp: Bounds | None = attrs.field(
        default=_CLAMP, metadata=SEMANTIC, converter=as_bounds, validator=check_bounds
    )


@strict
@attrs.frozen(kw_only=True)
class Reinforce(FormulaLoss):
    """Policy gradient on policy (Williams 1992): -A logprob. verl's `gpg` (arXiv:2504.02546)."""

    name: ClassVar[str] = "reinforce"
    fields_read: ClassVar[frozenset[str]] = frozenset({"advantages"})


@strict
@attrs.frozen(kw_only=True)
class CrossEntropy(FormulaLoss):
    """Supervised fine-tuning: -logprob, each token times its importance weight where given.

    verl's `sft_loss`: CrossEntropy(). SkyRL's `cross_entropy`: CrossEntropy(aggregation="sum").
    """

    name: ClassVar[str] = "cross_entropy"
