"""Mock backend: AdamW in float64 (imports numpy, the model's types and remote_rl's types)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs
import numpy as np

from remote_rl.types import AdamW

from .model import Floats, Weights, frozen


@attrs.frozen(eq=False)
class OptimizerState:
    """Steps taken, and first and second moments by weight name (read-only arrays)."""

    step: int
    first: Weights
    second: Weights

    @classmethod
    def fresh(cls, weights: Weights) -> OptimizerState:
        """That of a new run."""
        zeros = frozen({name: np.zeros(array.shape) for name, array in weights.items()})
        return cls(0, zeros, zeros)


def gradient_norm(gradient: Mapping[str, Floats]) -> float:
    """2-norm over all weights together; NaN or infinite where the gradient is."""
    with np.errstate(over="ignore", invalid="ignore"):
        return math.sqrt(sum(float(np.square(array).sum()) for array in gradient.values()))


def clipped(gradient: Weights, norm: float, max_norm: float | None) -> Weights:
    """The gradient times min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_."""
    if max_norm is None:
        return gradient
    factor = min(1.0, max_norm / (norm + 1e-6))
    return {name: array * factor for name, array in gradient.items()}


def _moved(
    weight: Floats,
    first: Floats,
    second: Floats,
    options: AdamW,
    step_size: float,
    root_correction: float,
) -> Floats:
    denominator = np.sqrt(second) / root_correction + options.eps
    decayed = weight * (1.0 - options.lr * options.weight_decay)
    result: Floats = decayed - step_size * (first / denominator)
    return result


def adamw_step(
    weights: Weights, gradient: Weights, state: OptimizerState, options: AdamW
) -> tuple[dict[str, Floats], OptimizerState]:
    """New weights and state by the formula of torch.optim.AdamW (decoupled weight decay first,
    bias-corrected moments, eps outside the root); the arguments stay as they are."""
    beta1, beta2 = options.betas
    step = state.step + 1
    step_size = options.lr / (1.0 - beta1**step)
    root_correction = math.sqrt(1.0 - beta2**step)
    moved: dict[str, Floats] = {}
    first: dict[str, Floats] = {}
    second: dict[str, Floats] = {}
    for name, weight in weights.items():
        slope = gradient[name]
        first[name] = state.first[name] + (slope - state.first[name]) * (1.0 - beta1)
        second[name] = state.second[name] * beta2 + slope * slope * (1.0 - beta2)
        # an update beyond float64 is told by its result, which the trainer looks at
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            moved[name] = _moved(
                weight, first[name], second[name], options, step_size, root_correction
            )
    return frozen(moved), OptimizerState(step, frozen(first), frozen(second))
