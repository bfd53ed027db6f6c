"""Values, derivatives and metrics on numpy: against numbers worked out by hand, finite differences,
and themselves on pieces of the batch."""

import math

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remote_rl import losses
from remote_rl.errors import InvalidRequestError
from remote_rl.types import Batch, Ragged

AGGREGATIONS = [
    losses.sum(),
    losses.token_mean(),
    losses.sequence_mean_token_sum(),
    losses.sequence_mean_token_mean(),
    losses.sequence_mean_token_sum_norm(width=7),
]


def every_loss():
    for index, aggregation in enumerate(AGGREGATIONS):
        other, third = AGGREGATIONS[index - 1], AGGREGATIONS[index - 2]
        terms = {
            "aggregation": aggregation,
            "kl": losses.KL(0.3, aggregation=other, value_clamp=None),
            "entropy": losses.Entropy(0.2, aggregation=third),
            "scale": 0.5,
        }
        yield losses.PPO(**terms)
        yield losses.PPO(dual_clip=1.5, clip_high=0.1, **terms)
        yield losses.PPO(ratio="sequence", log_ratio_clamp=(None, 10), **terms)
        yield losses.CISPO(clip_low=None, **terms)
        yield losses.ImportanceSampling(**terms)
        yield losses.Reinforce(**terms)
        yield losses.CrossEntropy(**terms)


LOSSES = list(every_loss())


def random_batch(seed, lengths, counted=0.7, spread=0.4, weighted=True):
    """A batch whose responses have these lengths, and its float64 outputs."""
    generator = np.random.default_rng(seed)
    responses = Ragged.from_rows([np.arange(length) for length in lengths], np.int32)
    total = len(responses.values)

    def floats(values):
        return responses.with_values(np.asarray(values, np.float32))

    old = -generator.exponential(1.5, total)
    advantages = generator.normal(size=total) * (generator.random(total) > 0.2)
    batch = Batch(
        prompts=[[1]],
        prompt_index=np.zeros(len(lengths), np.int32),
        responses=responses,
        temperature=np.ones(len(lengths), np.float32),
        mask=responses.with_values((generator.random(total) < counted).astype(np.uint8)),
        advantages=floats(advantages),
        old_logprobs=floats(old),
        ref_logprobs=floats(old + generator.normal(size=total) * spread),
        importance_weights=floats(generator.exponential(1.0, total)) if weighted else None,
    )
    outputs = {
        "logprobs": old + generator.normal(size=total) * spread,
        "entropy": generator.exponential(1.0, total),
    }
    return batch, outputs


def evaluate(loss, batch, outputs):
    dtype = next(iter(outputs.values())).dtype
    arrays = losses.LossBatch.from_batch(batch, lambda array: array, dtype=dtype)
    return losses.evaluate(loss, arrays, outputs)


def numbers(value):
    yield value.value
    for derivative in value.derivatives.values():
        yield from derivative
    yield from losses.metric_values(value.metrics).values()


def test_a_batch_worked_out_by_hand():
    # rows: r = [1.5, 1, 2], [0.5]; A = [1, -1, -1], [1]; the second token does not count
    responses = Ragged.from_rows([[1, 2, 3], [4]], np.int32)

    def floats(*values):
        return responses.with_values(np.asarray(values, np.float32))

    batch = Batch(
        prompts=[[1]],
        prompt_index=[0, 0],
        responses=responses,
        temperature=1.0,
        mask=[[1, 0, 1], [1]],
        advantages=floats(1, -1, -1, 1),
        old_logprobs=floats(0, 0, 0, 0),
        importance_weights=floats(2, 9, 1, 1),
    )
    outputs = {"logprobs": np.log([1.5, 1, 2, 0.5])}
    token_mean = evaluate(losses.PPO(), batch, outputs)
    # losses: clipped at 1.2 -> -1.2 x weight 2; not clipped (A < 0) -> 2; not clipped -> -0.5
    assert token_mean.value == pytest.approx((-2.4 + 2 - 0.5) / 3)
    np.testing.assert_allclose(token_mean.derivatives["logprobs"], [0, 0, 2 / 3, -0.5 / 3])
    metrics = losses.metric_values(token_mean.metrics)
    assert metrics["clip_fraction"] == metrics["clip_fraction_high"] == pytest.approx(1 / 3)
    assert metrics["clip_fraction_low"] == 0
    assert metrics["ratio_mean"] == pytest.approx(4 / 3)
    assert (metrics["ratio_max"], metrics["ratio_min"]) == pytest.approx((2, 0.5))
    assert metrics["approximate_kl_k1"] == pytest.approx(-math.log(1.5 * 2 * 0.5) / 3)
    assert metrics["approximate_kl_k3"] == pytest.approx((4 - 3 - math.log(1.5 * 2 * 0.5)) / 3)
    assert (metrics["tokens"], metrics["sequences"]) == (3, 2)
    by_kind = {
        "sum": -0.9,
        "sequence_mean_token_sum": -0.9 / 2,
        "sequence_mean_token_mean": (-0.4 / 2 - 0.5) / 2,
    }
    for kind, expected in by_kind.items():
        assert evaluate(losses.PPO(aggregation=kind), batch, outputs).value == pytest.approx(
            expected
        )
    norm = losses.PPO(aggregation=losses.sequence_mean_token_sum_norm(width=10))
    assert evaluate(norm, batch, outputs).value == pytest.approx(-0.9 / 20)
    dual = evaluate(losses.PPO(dual_clip=1.7), batch, outputs)
    assert dual.value == pytest.approx((-2.4 + 1.7 - 0.5) / 3)
    assert losses.metric_values(dual.metrics)["clip_fraction_dual"] == pytest.approx(1 / 3)
    # GSPO: row means of log r over counted tokens are log(3) / 2 and log(0.5)
    sequence = evaluate(losses.PPO(ratio="sequence", clip_high=1), batch, outputs)
    expected = (-2 * math.sqrt(3) + math.sqrt(3) - 0.5) / 3
    assert sequence.value == pytest.approx(expected)


def has_constants(loss):
    """Part of the value is a constant of its derivative; those are checked against autograd."""
    return isinstance(loss, losses.CISPO) or getattr(loss, "ratio", "") == "sequence"


@pytest.mark.parametrize(
    "loss",
    [loss for loss in LOSSES if not has_constants(loss)],
    ids=lambda loss: f"{loss.name}-{loss.aggregation.kind}",
)
def test_derivatives_are_the_slopes_of_the_value(loss):
    batch, outputs = random_batch(3, [4, 0, 1, 5])
    exact, step = evaluate(loss, batch, outputs).derivatives, 1e-6
    for name in outputs:
        for token in range(len(outputs[name])):
            shifted = []
            for sign in (1, -1):
                moved = outputs[name].copy()
                moved[token] += sign * step
                shifted.append(evaluate(loss, batch, outputs | {name: moved}).value)
            slope = (shifted[0] - shifted[1]) / (2 * step)
            assert exact[name][token] == pytest.approx(slope, abs=1e-7, rel=1e-6)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=6),
    loss=st.sampled_from(LOSSES),
    counted=st.sampled_from([0.3, 1.0]),
    data=st.data(),
)
def test_pieces_in_any_order_add_up_to_the_whole(seed, lengths, loss, counted, data):
    batch, outputs = random_batch(seed, lengths, counted=counted)
    order = data.draw(st.permutations(range(len(lengths))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(lengths)), max_size=3)))
    groups = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(lengths)], strict=True)]
    resolved = losses.resolve(loss, batch)
    whole = evaluate(loss, batch, outputs)
    pieces, rows = [], {name: batch.responses.with_values(outputs[name]) for name in outputs}
    for group in groups:
        taken = np.asarray(group, np.int64)
        parts = {name: rows[name].select(taken).values for name in outputs}
        pieces.append(evaluate(resolved.select(taken), batch.select(taken), parts))
    scale = sum(abs(piece.value) for piece in pieces) + abs(whole.value)
    assert math.isclose(sum(p.value for p in pieces), whole.value, abs_tol=1e-12 * scale)
    index = np.concatenate([np.asarray(group, np.int64) for group in groups])
    for name in whole.derivatives:
        expected = batch.responses.with_values(whole.derivatives[name]).select(index).values
        found = np.concatenate([piece.derivatives[name] for piece in pieces])
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)
    merged = losses.metric_values(losses.merge_metrics(p.metrics for p in pieces))
    assert merged == pytest.approx(losses.metric_values(whole.metrics), rel=1e-11, abs=1e-12)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss.name}-{loss.aggregation.kind}")
@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [3, 0, 2]])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_without_a_counted_token_everything_is_exactly_zero(loss, lengths, dtype):
    batch, outputs = random_batch(1, lengths, counted=0.0)
    outputs = {name: np.full(len(array), np.nan, dtype) for name, array in outputs.items()}
    for each in (loss, losses.resolve(loss, batch)):
        value = evaluate(each, batch, outputs)
        assert value.value == 0
        for name, derivative in value.derivatives.items():
            assert derivative.dtype == dtype
            assert not derivative.any(), name
        assert not any(losses.metric_values(value.metrics).values())
        assert "ratio_mean" not in losses.metric_values(value.metrics)


@pytest.mark.parametrize("clamps", [{}, {"log_ratio_clamp": None}])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_extreme_ratios_stay_finite(clamps, dtype):
    batch, _ = random_batch(5, [3, 4, 2], counted=1.0)
    shifts = np.array([1e3, -1e3, 88.0, -88.0, 1e6, -1e30, 50.0, 0.0, 700.0])
    outputs = {
        "logprobs": (batch.old_logprobs.values + shifts).astype(dtype),
        "entropy": np.ones(9, dtype),
    }
    with np.errstate(over="raise", invalid="raise"):
        for loss in (
            losses.PPO(**clamps),
            losses.PPO(dual_clip=3.0, **clamps),
            losses.PPO(ratio="sequence", **clamps),
            losses.CISPO(clip_high=None, **clamps),
            losses.ImportanceSampling(**clamps),
            losses.ImportanceSampling(ratio="sequence", **clamps),
        ):
            for estimator in ("k3", "k1", "abs", "k3+"):
                kl = losses.KL(0.1, estimator=estimator, value_clamp=None, **clamps)
                full = attrs.evolve(loss, kl=kl, entropy=losses.Entropy(0.1))
                assert all(
                    math.isfinite(number) for number in numbers(evaluate(full, batch, outputs))
                )


def test_minus_infinity_is_an_extreme_ratio_like_others():
    batch, outputs = random_batch(6, [3], counted=1.0)
    outputs["logprobs"][1] = -np.inf
    for loss in (losses.PPO(kl=losses.KL(0.1)), losses.PPO(ratio="sequence")):
        assert all(math.isfinite(number) for number in numbers(evaluate(loss, batch, outputs)))


def test_nan_at_a_counted_token_is_not_hidden():
    batch, outputs = random_batch(6, [3], counted=1.0)
    outputs["logprobs"][1] = np.nan
    value = evaluate(losses.Reinforce(), batch, outputs)
    assert math.isnan(value.value)


def test_what_stands_at_uncounted_tokens_changes_nothing():
    batch, outputs = random_batch(8, [4, 3, 0, 2], counted=0.5)
    off = batch.mask.values == 0
    noisy = {name: np.where(off, np.nan, array) for name, array in outputs.items()}
    fields = {}
    for name in ("advantages", "old_logprobs", "ref_logprobs", "importance_weights"):
        ragged = getattr(batch, name)
        fields[name] = ragged.with_values(np.where(off, np.float32(1e30), ragged.values))
    for loss in LOSSES:
        clean = list(numbers(evaluate(loss, batch, outputs)))
        assert list(numbers(evaluate(loss, batch.replace(**fields), noisy))) == clean


def test_importance_weights_multiply_the_policy_term_only():
    batch, outputs = random_batch(9, [4, 3], weighted=False)
    doubled = batch.replace(importance_weights=np.full(2, 2, np.float32))
    loss = losses.PPO(kl=losses.KL(1.0), entropy=losses.Entropy(1.0))
    once, twice = evaluate(loss, batch, outputs), evaluate(loss, doubled, outputs)
    before, after = (losses.metric_values(each.metrics) for each in (once, twice))
    assert after["policy_loss"] == pytest.approx(2 * before["policy_loss"])
    for name in ("kl_loss", "entropy", "ratio_mean", "tokens"):
        assert after[name] == before[name]
    np.testing.assert_array_equal(once.derivatives["entropy"], twice.derivatives["entropy"])


def test_scale_and_coefficients():
    batch, outputs = random_batch(10, [4, 3])
    loss = losses.PPO(kl=losses.KL(0.5), entropy=losses.Entropy(0.25), scale=3.0)
    value = evaluate(loss, batch, outputs)
    metrics = losses.metric_values(value.metrics)
    expected = metrics["policy_loss"] + 0.5 * metrics["kl_loss"] - 0.25 * metrics["entropy"]
    assert value.value == pytest.approx(3 * expected)


def test_straight_through_estimators_have_the_value_of_one_and_the_slope_of_k2():
    batch, outputs = random_batch(11, [4, 3], counted=1.0)

    def kl(estimator):
        loss = losses.CrossEntropy(kl=losses.KL(1.0, estimator=estimator), aggregation="sum")
        value = evaluate(loss, batch, outputs)
        return losses.metric_values(value.metrics)["kl_loss"], value.derivatives["logprobs"]

    for estimator in ("k1", "k3", "abs"):
        value, slopes = kl(estimator + "+")
        assert value == kl(estimator)[0]
        np.testing.assert_allclose(slopes, kl("k2")[1])


def test_cotangents_are_applied_as_they_are():
    batch, outputs = random_batch(12, [2, 0, 1], counted=0.0)
    given = {"logprobs": [[1.0, -2.0], [], [0.5]], "entropy": [[0.0, 3.0], [], [0.0]]}
    value = evaluate(losses.Cotangents(given, version=1), batch, outputs)
    np.testing.assert_array_equal(value.derivatives["logprobs"], [1, -2, 0.5])
    np.testing.assert_array_equal(value.derivatives["entropy"], [0, 3, 0])
    expected = np.dot([1, -2, 0.5], outputs["logprobs"]) + 3 * outputs["entropy"][1]
    assert value.value == pytest.approx(expected)
    with pytest.raises(InvalidRequestError, match="entropy"):
        evaluate(losses.Cotangents(given, version=1), batch, {"logprobs": outputs["logprobs"]})


def test_outputs_are_checked_by_name():
    batch, outputs = random_batch(13, [2, 1])
    loss = losses.PPO(entropy=losses.Entropy(0.1))
    with pytest.raises(InvalidRequestError, match="'entropy'"):
        evaluate(loss, batch, {"logprobs": outputs["logprobs"]})
    with pytest.raises(InvalidRequestError, match="shape"):
        evaluate(losses.PPO(), batch, {"logprobs": outputs["logprobs"][:-1]})
    with pytest.raises(InvalidRequestError, match="float32 or float64"):
        evaluate(losses.PPO(), batch, {"logprobs": outputs["logprobs"].astype(np.float16)})
    with pytest.raises(InvalidRequestError, match="Custom can't be evaluated"):
        evaluate(losses.custom(len), batch, outputs)


def test_evaluate_writes_to_nothing_it_was_given():
    batch, outputs = random_batch(14, [3, 2])
    for array in outputs.values():
        array.flags.writeable = False
    arrays = losses.LossBatch.from_batch(batch, lambda array: array)
    before = arrays.mask.copy(), arrays.advantages.copy()
    for loss in LOSSES:
        losses.evaluate(loss, arrays, outputs)
    np.testing.assert_array_equal(arrays.mask, before[0])
    np.testing.assert_array_equal(arrays.advantages, before[1])


def test_metrics_of_different_kinds_do_not_merge():
    with pytest.raises(InvalidRequestError, match="merged"):
        losses.Metric("mean", 1.0, 1.0).merge(losses.Metric("sum", 1.0, 1.0))
