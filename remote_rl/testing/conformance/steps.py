"""Testing: steps of AdamW whose effect is known (imports nothing)."""

from __future__ import annotations

from typing import Any

#: eps is this many gradient norms: beside it the root of the second moment is nothing
_DROWNED = 1e4


def downhill(length: float, norm: float) -> dict[str, Any]:
    """Knobs that make AdamW plain gradient descent: weights move by -length x gradient.

    Without memory (betas 0) the moments are g and g squared, and g / (|g| + eps) is g / eps where
    eps drowns |g|. norm: of the gradient, at least as large as each |g|."""
    eps = _DROWNED * norm
    return {"lr": length * eps, "eps": eps, "betas": (0.0, 0.0), "weight_decay": 0.0}
