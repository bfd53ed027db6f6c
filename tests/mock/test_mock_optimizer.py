"""AdamW of the mock against its formula number by number; tests/torch has it against torch."""

from __future__ import annotations

import math

import numpy as np
import pytest

from backends.mock.optimizer import OptimizerState, adamw_step, clipped, gradient_norm
from remote_rl.types import AdamW

OPTIONS = (
    AdamW(lr=0.1),
    AdamW(lr=0.05, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.3),
    AdamW(lr=0.02, weight_decay=0.0, max_grad_norm=0.5),
)


def arrays(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {"a": random.standard_normal((3, 4)), "b": random.standard_normal(5)}


def walk() -> dict[str, np.ndarray]:
    weights = arrays(0)
    state = OptimizerState.fresh(weights)
    for step, options in enumerate(OPTIONS * 2):
        gradient = arrays(step + 1)
        scaled = clipped(gradient, gradient_norm(gradient), options.max_grad_norm)
        weights, state = adamw_step(weights, scaled, state, options)
    assert state.step == 6
    return weights


def test_each_number_follows_the_formula() -> None:
    flat = [float(x) for array in arrays(0).values() for x in array.reshape(-1)]
    first, second = [0.0] * len(flat), [0.0] * len(flat)
    for step, options in enumerate(OPTIONS * 2, start=1):
        slopes = [float(x) for array in arrays(step).values() for x in array.reshape(-1)]
        if options.max_grad_norm is not None:
            norm = math.sqrt(sum(slope * slope for slope in slopes))
            slopes = [slope * min(1.0, options.max_grad_norm / (norm + 1e-6)) for slope in slopes]
        beta1, beta2 = options.betas
        for index, slope in enumerate(slopes):
            first[index] = beta1 * first[index] + (1 - beta1) * slope
            second[index] = beta2 * second[index] + (1 - beta2) * slope**2
            corrected = math.sqrt(second[index] / (1 - beta2**step)) + options.eps
            flat[index] *= 1 - options.lr * options.weight_decay
            flat[index] -= options.lr * first[index] / (1 - beta1**step) / corrected
    result = [float(x) for array in walk().values() for x in array.reshape(-1)]
    assert result == pytest.approx(flat, rel=1e-12)


def test_arguments_stay_and_results_are_read_only() -> None:
    weights, gradient = arrays(0), arrays(1)
    state = OptimizerState.fresh(weights)
    moved, after = adamw_step(weights, gradient, state, AdamW(lr=0.1))
    assert state.step == 0
    assert not state.first["a"].any()
    assert np.array_equal(weights["a"], arrays(0)["a"])
    for array in (moved["a"], after.first["a"], after.second["a"]):
        assert not array.flags.writeable


def test_norms_that_are_not_finite() -> None:
    assert math.isinf(gradient_norm({"a": np.array([1e200])}))
    assert math.isnan(gradient_norm({"a": np.array([np.nan]), "b": np.ones(2)}))
    assert gradient_norm({"a": np.array([3.0]), "b": np.array([4.0])}) == 5.0
