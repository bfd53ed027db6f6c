"""The mock's optimizer and its reading of pushed dtypes, against torch's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from backends.mock.optimizer import OptimizerState, adamw_step, clipped, gradient_norm
from backends.mock.weights import decoded
from remote_rl import AdamW, Tensor

OPTIONS = [
    AdamW(lr=0.1),
    AdamW(lr=0.02, betas=(0.8, 0.95), eps=1e-5, weight_decay=0.3),
    AdamW(lr=0.3, weight_decay=0.0, max_grad_norm=0.5),
    AdamW(lr=0.05, eps=1e-3, max_grad_norm=1e6),
]


def arrays(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {"a": random.standard_normal((3, 4)), "b": random.standard_normal(5)}


def test_adamw_takes_the_steps_that_torch_takes() -> None:
    held = {name: torch.nn.Parameter(torch.tensor(array)) for name, array in arrays(0).items()}
    optimizer = torch.optim.AdamW(held.values(), lr=1.0)
    weights, state = arrays(0), OptimizerState.fresh(arrays(0))
    for step, options in enumerate(OPTIONS * 2):
        gradient = arrays(step + 1)
        scaled = clipped(gradient, gradient_norm(gradient), options.max_grad_norm)
        weights, state = adamw_step(weights, scaled, state, options)
        for name, array in gradient.items():
            held[name].grad = torch.tensor(array)
        if options.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(held.values(), options.max_grad_norm)
        optimizer.param_groups[0].update(
            lr=options.lr, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay
        )
        optimizer.step()
        for name, array in weights.items():
            assert np.allclose(array, held[name].detach().numpy(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("dtype", "storage", "count"),
    [
        ("float8_e4m3fn", np.uint8, 256),
        ("float8_e5m2", np.uint8, 256),
        ("bfloat16", np.uint16, 65536),
    ],
)
def test_all_bits_of_the_small_floats_mean_what_torch_says(
    dtype: str, storage: type, count: int
) -> None:
    data = np.arange(count, dtype=storage)
    wanted = torch.from_numpy(data).view(getattr(torch, dtype)).to(torch.float64).numpy()
    assert np.array_equal(decoded(Tensor(data=data, dtype=dtype)), wanted, equal_nan=True)
