"""The mock's policy: windows, outputs and derivatives, by plain loops and finite differences."""

from __future__ import annotations

import numpy as np
import pytest
from mock_workload import SMALL, example_batch

from backends.mock import model, passes
from remote_rl import losses
from remote_rl.types import Batch, Ragged


def weights_of(seed: int = 3, **changes: int) -> dict[str, np.ndarray]:
    sizes = {
        name: SMALL[name] for name in ("vocab_size", "window", "embedding_size", "hidden_size")
    }
    base = model.initial_weights(**(sizes | changes), initial_scale=1.0, seed=seed)
    random = np.random.default_rng(seed)
    return {name: array + random.standard_normal(array.shape) * 0.1 for name, array in base.items()}


def plain_logits(weights: dict[str, np.ndarray], text: list[int]) -> np.ndarray:
    window = weights[model.WINDOW].shape[1]
    total = weights[model.WINDOW_BIAS].copy()
    for lag in range(1, window + 1):
        if lag <= len(text):
            total += weights[model.WINDOW][:, lag - 1] @ weights[model.EMBEDDING][text[-lag]]
    return weights[model.HEAD] @ np.tanh(total) + weights[model.HEAD_BIAS]


def test_outputs_are_those_of_the_formula_token_by_token() -> None:
    weights, batch = weights_of(), example_batch()
    held = passes.outputs(weights, batch)
    position = 0
    for row in range(len(batch)):
        text = batch.prompts[int(batch.prompt_index[row])].tolist()
        for token in batch.responses[row].tolist():
            logits = plain_logits(weights, text) / float(batch.temperature[row])
            logprobs = logits - np.log(np.exp(logits).sum())
            entropy = -(np.exp(logprobs) * logprobs).sum()
            assert held["logprobs"][position] == pytest.approx(logprobs[token], abs=1e-12)
            assert held["entropy"][position] == pytest.approx(entropy, abs=1e-12)
            text.append(token)
            position += 1
    assert position == len(held["logprobs"])


def test_a_rows_bits_do_not_depend_on_its_company() -> None:
    weights = weights_of(vocab_size=259, window=8, embedding_size=32, hidden_size=48)
    batch = example_batch(vocab_size=259, rows=300)
    whole = batch.responses.with_values(passes.outputs(weights, batch)["logprobs"])
    order = np.random.default_rng(1).permutation(len(batch))
    shuffled_batch = batch.select(order)
    shuffled = shuffled_batch.responses.with_values(
        passes.outputs(weights, shuffled_batch)["logprobs"]
    )
    assert whole.select(order) == shuffled
    alone = batch.select([17])
    assert np.array_equal(passes.outputs(weights, alone)["logprobs"], whole[17])


def test_prompt_sharing_changes_nothing() -> None:
    weights, batch = weights_of(), example_batch()
    spelled = Batch(
        prompts=batch.prompts.select(batch.prompt_index),
        prompt_index=np.arange(len(batch)),
        responses=batch.responses,
        temperature=batch.temperature,
    )
    for name, column in passes.outputs(weights, batch).items():
        assert np.array_equal(column, passes.outputs(weights, spelled)[name])


def test_pieces_and_deep_products_agree_with_plain_ones() -> None:
    random = np.random.default_rng(0)
    for rows, columns, terms in ((1, 1, 1), (65, 9, 257), (130, 300, 700), (64, 16, 256)):
        left, right = (
            random.standard_normal((rows, terms)),
            random.standard_normal((columns, terms)),
        )
        assert np.allclose(model._product(left, right), left @ right.T, atol=1e-11)


ALL_TERMS = {
    "kl": losses.KL(0.3, estimator="k3"),
    "entropy": losses.Entropy(0.2, aggregation="sequence_mean_token_mean"),
}
LOSSES = {
    "ppo": losses.PPO(**ALL_TERMS, scale=0.5),
    "ppo_dual": losses.PPO(dual_clip=1.5, aggregation="sum"),
    "ppo_k2": losses.PPO(kl=losses.KL(0.5, estimator="k2")),
    "importance": losses.ImportanceSampling(**ALL_TERMS),
    "reinforce": losses.Reinforce(aggregation="sequence_mean_token_sum"),
    "cross_entropy": losses.CrossEntropy(entropy=losses.Entropy(-0.1)),
    "cispo": losses.CISPO(**ALL_TERMS),
    "sequence_ratio": losses.PPO(ratio="sequence", aggregation="sequence_mean_token_mean"),
}
#: whose derivative is by definition not that of the value
STOPPED = {"cispo", "sequence_ratio"}


def slopes_along(
    weights: dict[str, np.ndarray], name: str, number: object, step: float = 1e-5
) -> tuple[np.ndarray, float]:
    direction = np.random.default_rng(5).standard_normal(weights[name].shape)
    up = number(weights | {name: weights[name] + step * direction})
    down = number(weights | {name: weights[name] - step * direction})
    return direction, (up - down) / (2 * step)


@pytest.mark.parametrize("kind", [*LOSSES, "cotangents"])
def test_gradients_are_finite_differences(kind: str) -> None:
    weights, batch = weights_of(), example_batch()
    if kind == "cotangents":
        random = np.random.default_rng(2)
        loss: losses.Loss = losses.Cotangents(
            {
                name: batch.responses.with_values(
                    random.standard_normal(len(batch.responses.values)).astype(np.float32)
                )
                for name in ("logprobs", "entropy")
            },
            version=0,
        )
    else:
        loss = losses.resolve(LOSSES[kind], batch)
    value, gradient = passes.backward(weights, batch, loss)

    def linear(changed: dict[str, np.ndarray]) -> float:
        held = passes.outputs(changed, batch)
        return sum(float(each @ held[name]) for name, each in value.derivatives.items())

    def whole(changed: dict[str, np.ndarray]) -> float:
        return passes.backward(changed, batch, loss)[0].value

    for name in weights:
        for number in (linear,) if kind in STOPPED else (linear, whole):
            direction, slope = slopes_along(weights, name, number)
            assert (gradient[name] * direction).sum() == pytest.approx(slope, rel=2e-6, abs=1e-8)


@pytest.mark.parametrize("kind", LOSSES)
def test_micro_batches_add_up_to_the_whole(kind: str) -> None:
    weights, batch = weights_of(), example_batch()
    loss = losses.resolve(LOSSES[kind], batch)
    value, gradient = passes.backward(weights, batch, loss)
    total, sum_of_values = None, 0.0
    for rows in passes.micro_batches(len(batch), 2):
        assert rows is not None
        part, piece = passes.backward(weights, batch.select(rows), loss.select(rows))
        total, sum_of_values = passes.added(total, piece), sum_of_values + part.value
    assert sum_of_values == pytest.approx(value.value, rel=1e-12)
    for name in gradient:
        assert np.allclose(total[name], gradient[name], rtol=1e-11, atol=1e-14)


def test_windows_of_prompts_are_the_first_of_their_responses() -> None:
    prompts = Ragged.from_rows([[1], [2, 3], [4, 5, 6, 7, 8]], np.int32)
    responses = Ragged.from_rows([[9, 10]] * 3, np.int32)
    windows = model.response_windows(prompts, np.arange(3, dtype=np.int32), responses, 3)
    assert windows.tolist() == [
        [1, -1, -1],
        [9, 1, -1],
        [3, 2, -1],
        [9, 3, 2],
        [8, 7, 6],
        [9, 8, 7],
    ]
    assert np.array_equal(model.prompt_windows(prompts, 3), windows[::2])


def test_large_batches_are_fast_and_bounded() -> None:
    weights = weights_of(vocab_size=259, window=8, embedding_size=8, hidden_size=16)
    random = np.random.default_rng(0)
    batch = Batch(
        prompts=[random.integers(0, 259, 50)],
        prompt_index=np.zeros(64, np.int32),
        responses=random.integers(0, 259, (64, 512)),
        temperature=1.0,
        advantages=random.standard_normal((64, 512)),
    )
    held = passes.outputs(weights, batch)
    value, gradient = passes.backward(weights, batch, losses.resolve(losses.Reinforce(), batch))
    assert np.isfinite(held["entropy"]).all()
    assert np.isfinite(value.value)
    assert all(np.isfinite(array).all() for array in gradient.values())
