"""The mock's trainer: accumulation, steps, versions, snapshots and the reference; and that it
learns."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
from mock_workload import Run, example_batch, running

from remote_rl import losses
from remote_rl.errors import InvalidRequestError
from remote_rl.types import AdamW, Batch

STEP = AdamW(lr=0.05)


async def train(run: Run, seed: int = 0, loss: losses.Loss | None = None, **options: Any) -> Any:
    loss = loss or losses.CrossEntropy()
    await run.do("forward_backward", batch=example_batch(seed=seed), loss=loss)
    return await run.do("optim_step", optimizer=attrs.evolve(STEP, **options))


def weights(run: Run) -> dict[str, np.ndarray]:
    return dict(run.backend.training.policy.weights)


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(left[name], right[name]) for name in left)


@running
async def test_forward_gives_what_is_asked_for_in_float32() -> None:
    run = await Run().start()
    batch = example_batch()
    outputs = await run.do("forward", batch=batch, outputs={"entropy"})
    assert set(outputs.values) == {"entropy"}
    assert outputs.entropy.dtype == np.float32
    assert np.array_equal(outputs.entropy.offsets, batch.responses.offsets)
    assert outputs.version == 0


@running
async def test_micro_batches_change_no_bit_of_a_forward_and_no_result() -> None:
    whole, pieces = await Run().start(), await Run(micro_batch_rows=2).start()
    batch = example_batch()
    names = {"logprobs", "entropy"}
    first = await whole.do("forward", batch=batch, outputs=names)
    second = await pieces.do("forward", batch=batch, outputs=names)
    assert all(first[name] == second[name] for name in names)
    loss = losses.PPO(kl=losses.KL(0.1), entropy=losses.Entropy(0.1))
    results = [await run.do("forward_backward", batch=batch, loss=loss) for run in (whole, pieces)]
    assert results[0].value == pytest.approx(results[1].value, rel=1e-12)
    assert results[0].metrics == pytest.approx(results[1].metrics, rel=1e-9)
    norms = [(await run.do("optim_step", optimizer=STEP)).grad_norm for run in (whole, pieces)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-12)


@running
async def test_gradients_accumulate_to_that_of_the_sum() -> None:
    run = await Run().start()
    batch = example_batch()
    loss = losses.CrossEntropy(aggregation="sum")
    for part in batch.split(2):
        await run.do("forward_backward", batch=part, loss=loss)
    pieces = (await run.do("optim_step", optimizer=attrs.evolve(STEP, lr=0.0))).grad_norm
    await run.do("forward_backward", batch=batch, loss=loss)
    whole = (await run.do("optim_step", optimizer=STEP)).grad_norm
    assert pieces == pytest.approx(whole, rel=1e-12)


@running
async def test_zero_grad_discards() -> None:
    run = await Run().start()
    await run.do("forward_backward", batch=example_batch(seed=1), loss=losses.CrossEntropy())
    await run.do("zero_grad")
    other = await Run().start()
    assert (await train(run)).grad_norm == (await train(other)).grad_norm
    assert same(weights(run), weights(other))


@running
async def test_a_gradient_that_is_not_finite_is_skipped() -> None:
    run, calm = await Run().start(), await Run().start()
    await train(run)
    await train(calm)
    huge = losses.CrossEntropy(scale=1e200)
    result = await train(run, loss=huge, max_grad_norm=1.0)
    assert result.skipped
    assert np.isinf(result.grad_norm)
    assert result.version == run.version == 1
    assert same(weights(run), weights(calm))
    await train(run, seed=2)  # the moments are as they were, and the accumulator was empty
    await train(calm, seed=2)
    assert same(weights(run), weights(calm))


@running
async def test_the_norm_is_that_before_clipping_and_clipping_bites() -> None:
    plain, clipped = await Run().start(), await Run().start()
    first = await train(plain, eps=0.1)
    second = await train(clipped, eps=0.1, max_grad_norm=first.grad_norm / 10)
    assert first.grad_norm == second.grad_norm
    assert not same(weights(plain), weights(clipped))


@running
async def test_cotangents_give_the_gradient_of_the_loss_they_come_from() -> None:
    run, other = await Run().start(), await Run().start()
    batch = example_batch()
    loss = losses.resolve(losses.PPO(entropy=losses.Entropy(0.3)), batch)
    outputs = await run.do("forward", batch=batch, outputs={"logprobs", "entropy"})
    value = losses.evaluate(
        loss,
        losses.LossBatch.from_batch(batch, lambda array: array),
        {name: rows.values for name, rows in outputs.values.items()},
    )
    cotangents = losses.Cotangents(
        {name: batch.responses.with_values(each) for name, each in value.derivatives.items()},
        version=outputs.version,
    )
    one = await train(run, loss=cotangents)
    two = await train(other, loss=loss)
    assert one.grad_norm == pytest.approx(two.grad_norm, rel=1e-5)


@running
async def test_a_failed_forward_backward_adds_nothing() -> None:
    run, other = await Run(micro_batch_rows=1).start(), await Run(micro_batch_rows=1).start()
    await run.do("forward_backward", batch=example_batch(), loss=losses.CrossEntropy())
    lacking = example_batch(advantages=None)
    with pytest.raises(InvalidRequestError, match="PPO needs Batch"):
        await run.do("forward_backward", batch=lacking, loss=losses.PPO())
    one = await run.do("optim_step", optimizer=STEP)
    assert one.grad_norm == (await train(other)).grad_norm


@running
async def test_a_batch_in_which_nothing_counts_gives_zero() -> None:
    run = await Run().start()
    batch = example_batch()
    silent = attrs.evolve(batch, mask=batch.mask.with_values(np.zeros_like(batch.mask.values)))
    result = await run.do("forward_backward", batch=silent, loss=losses.PPO())
    assert result.value == 0
    assert (await run.do("optim_step", optimizer=STEP)).grad_norm == 0


@running
async def test_empty_responses_are_legal_everywhere() -> None:
    run = await Run().start()
    batch = Batch(
        prompts=[[1], [2]],
        prompt_index=[0, 1],
        responses=[[], []],
        temperature=1.0,
        advantages=[[], []],
    )
    outputs = await run.do("forward", batch=batch)
    assert outputs.logprobs.lengths.tolist() == [0, 0]
    assert (await run.do("forward_backward", batch=batch, loss=losses.Reinforce())).value == 0


@running
async def test_snapshots_and_reference() -> None:
    run = await Run().start()
    batch = example_batch()

    async def logprobs(policy: str) -> tuple[int, Any]:
        outputs = await run.do("forward", batch=batch, policy=policy)
        return outputs.version, outputs.logprobs

    base = await logprobs("current")
    assert await logprobs("reference") == base
    await train(run)
    trained = await logprobs("current")
    assert trained[0] == 1
    assert trained[1] != base[1]
    assert await logprobs("reference") == base
    await run.do("snapshot", name="first")
    await train(run)
    assert await logprobs("first") == trained
    await run.do("set_reference", source="first")
    assert await logprobs("reference") == trained
    await run.do("forward_backward", batch=batch, loss=losses.CrossEntropy())
    await run.do("restore_snapshot", name="first")
    assert (await logprobs("current"))[0] == run.version == 3
    assert (await logprobs("current"))[1] == trained[1]
    await run.do("drop_snapshot", name="first")
    assert await logprobs("reference") == trained
    await run.do("set_reference", source="current")
    assert await logprobs("reference") == await logprobs("current")
    await run.do("set_reference", source="base")
    assert await logprobs("reference") == base


@running
async def test_reset_is_a_new_run_under_a_later_version() -> None:
    run, fresh = await Run().start(), await Run().start()
    await train(run)
    await run.do("snapshot", name="kept")
    await run.do("set_reference", source="kept")
    await run.do("sync", label=3)
    await run.do("reset")
    assert run.version == 2
    assert run.backend.sampler_version() == (2, None)
    assert same(weights(run), weights(fresh))
    one, two = await train(run, seed=4), await train(fresh, seed=4)
    assert (one.grad_norm, one.version) == (two.grad_norm, 3)
    assert same(weights(run), weights(fresh))
    reference = await run.do("forward", batch=example_batch(), policy="reference")
    assert (
        reference.logprobs
        == (await fresh.do("forward", batch=example_batch(), policy="reference")).logprobs
    )


@running
async def test_it_learns_by_reinforcement() -> None:
    run = await Run(vocab_size=13, hidden_size=32, embedding_size=16, initial_scale=0.1).start()
    random = np.random.default_rng(0)
    curve = []
    for _ in range(60):
        asked = random.integers(0, 10, 32)
        samples = await run.generate([[10, int(token)] for token in asked], n=8, max_tokens=1)
        answers = np.array([int(sample.tokens[0]) for sample in samples]).reshape(32, 8)
        rewards = (answers == (asked[:, None] + 3) % 10).astype(np.float32)
        curve.append(float(rewards.mean()))
        spread = rewards - rewards.mean(axis=1, keepdims=True)
        spread /= rewards.std(axis=1, keepdims=True) + 1e-6
        batch = Batch(
            prompts=[[10, int(token)] for token in asked],
            prompt_index=np.repeat(np.arange(32), 8),
            responses=answers.reshape(-1, 1),
            temperature=1.0,
            advantages=spread.reshape(-1, 1),
            old_logprobs=[sample.logprobs for sample in samples],
        )
        loss = losses.PPO(entropy=losses.Entropy(0.05))
        await run.do("forward_backward", batch=batch, loss=loss)
        await run.do("optim_step", optimizer=AdamW(lr=0.03, weight_decay=0.0))
        await run.do("sync")
    assert curve[0] < 0.2
    assert np.mean(curve[-5:]) > 0.9
