"""Values and derivatives against torch's autograd of the same losses, written a second time.

The oracle knows only the papers' formulas on padded [rows, width] tensors, one row after the other;
it shares no code with remote_rl.losses.
"""

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from remote_rl import losses
from remote_rl.types import Batch, Ragged

torch.set_num_threads(1)

FIELDS = ("advantages", "old_logprobs", "ref_logprobs", "importance_weights")


# -- the oracle -----------------------------------------------------------------------------


def oracle(loss, padded, outputs):
    """The loss as a torch scalar that autograd can differentiate."""
    mask = padded["mask"]
    policy = oracle_policy(loss, padded, outputs["logprobs"])
    if padded["importance_weights"] is not None:
        policy = policy * padded["importance_weights"]
    value = oracle_aggregate(loss.aggregation, policy, mask)
    if loss.kl is not None:
        estimate = oracle_kl(loss.kl, outputs["logprobs"], padded["ref_logprobs"])
        value = value + loss.kl.coef * oracle_aggregate(loss.kl.aggregation, estimate, mask)
    if loss.entropy is not None:
        bonus = oracle_aggregate(loss.entropy.aggregation, outputs["entropy"], mask)
        value = value - loss.entropy.coef * bonus
    return loss.scale * value


def oracle_aggregate(aggregation, matrix, mask):
    rows = [matrix[row][mask[row] == 1] for row in range(len(matrix))]
    rows = [row for row in rows if len(row)]
    if not rows:
        return matrix.sum() * 0
    tokens = sum(len(row) for row in rows)
    kind, width = aggregation.kind, aggregation.width
    if kind == "sum":
        return torch.cat(rows).sum()
    if kind == "token_mean":
        return torch.cat(rows).sum() / (aggregation.denominator or tokens)
    per_row = {
        "sequence_mean_token_sum": lambda row: row.sum(),
        "sequence_mean_token_mean": lambda row: row.mean(),
        "sequence_mean_token_sum_norm": lambda row: row.sum() / width,
    }[kind]
    return torch.stack([per_row(row) for row in rows]).sum() / (
        aggregation.denominator or len(rows)
    )


def oracle_ratio(loss, padded, logprobs):
    log_ratio = logprobs - padded["old_logprobs"]
    if getattr(loss, "ratio", "token") == "sequence":
        means = []
        for row in range(len(log_ratio)):
            counted = log_ratio[row][padded["mask"][row] == 1]
            means.append(counted.mean() if len(counted) else log_ratio.new_zeros(()))
        means = torch.stack(means) if means else log_ratio.new_zeros(0)
        log_ratio = means.detach()[:, None] + logprobs - logprobs.detach()
    if loss.log_ratio_clamp is not None:
        log_ratio = torch.clamp(log_ratio, *loss.log_ratio_clamp)
    return torch.exp(log_ratio)


def oracle_policy(loss, padded, logprobs):
    advantages = padded["advantages"]
    if isinstance(loss, losses.CrossEntropy):
        return -logprobs
    if isinstance(loss, losses.Reinforce):
        return -advantages * logprobs
    ratio = oracle_ratio(loss, padded, logprobs)
    if isinstance(loss, losses.ImportanceSampling):
        return -advantages * ratio
    low = -float("inf") if loss.clip_low is None else 1 - loss.clip_low
    high = float("inf") if loss.clip_high is None else 1 + loss.clip_high
    clipped = torch.clamp(ratio, low, high)
    if isinstance(loss, losses.CISPO):
        return -clipped.detach() * advantages * logprobs
    policy = torch.maximum(-advantages * ratio, -advantages * clipped)
    if loss.dual_clip is not None:
        dual = torch.minimum(policy, -advantages * loss.dual_clip)
        policy = torch.where(advantages < 0, dual, policy)
    return policy


def oracle_kl(term, logprobs, reference):
    difference = logprobs - reference
    unclamped = difference
    if term.log_ratio_clamp is not None:
        difference = torch.clamp(difference, *term.log_ratio_clamp)
    kind = term.estimator.rstrip("+")
    if kind == "k1":
        value = difference
    elif kind == "abs":
        value = difference.abs()
    elif kind == "k2":
        value = difference**2 / 2
    else:
        value = torch.exp(-difference) + difference - 1
    if term.value_clamp is not None:
        value = torch.clamp(value, -term.value_clamp, term.value_clamp)
    if term.estimator.endswith("+"):
        square = unclamped**2 / 2
        value = value.detach() + square - square.detach()
    return value


# -- cases ----------------------------------------------------------------------------------

AGGREGATIONS = st.one_of(
    st.sampled_from(
        [
            losses.sum(),
            losses.token_mean(),
            losses.sequence_mean_token_sum(),
            losses.sequence_mean_token_mean(),
            losses.sequence_mean_token_sum_norm(width=11),
        ]
    ),
    st.builds(losses.token_mean, st.integers(1, 50)),
    st.builds(losses.sequence_mean_token_mean, st.floats(0.5, 9)),
    st.builds(losses.sequence_mean_token_sum_norm, st.just(3.5), st.integers(1, 9)),
)
CLAMPS = st.sampled_from([None, 20.0, 0.1, (None, 10.0), (-0.5, None), (-0.3, 0.7)])
KLS = st.builds(
    losses.KL,
    st.sampled_from([0.001, 1.0, -0.5]),
    estimator=st.sampled_from(["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"]),
    aggregation=AGGREGATIONS,
    log_ratio_clamp=CLAMPS,
    value_clamp=st.sampled_from([None, 10.0, 0.05]),
)
TERMS = {
    "aggregation": AGGREGATIONS,
    "kl": st.none() | KLS,
    "entropy": st.none()
    | st.builds(losses.Entropy, st.sampled_from([0.01, -1.0]), aggregation=AGGREGATIONS),
    "scale": st.sampled_from([1.0, 0.25, -2.0]),
}
CLIPS = st.sampled_from([0.2, 0.0, 0.01, 3.0])
RATIOS = st.sampled_from(["token", "sequence"])
LOSSES = {
    "ppo": st.builds(
        losses.PPO,
        clip_low=CLIPS,
        clip_high=CLIPS,
        dual_clip=st.sampled_from([None, 3.0, 1.05]),
        ratio=RATIOS,
        log_ratio_clamp=CLAMPS,
        **TERMS,
    ),
    "cispo": st.builds(
        losses.CISPO,
        clip_low=st.none() | CLIPS,
        clip_high=st.none() | CLIPS,
        log_ratio_clamp=CLAMPS,
        **TERMS,
    ),
    "importance_sampling": st.builds(
        losses.ImportanceSampling, ratio=RATIOS, log_ratio_clamp=CLAMPS, **TERMS
    ),
    "reinforce": st.builds(losses.Reinforce, **TERMS),
    "cross_entropy": st.builds(losses.CrossEntropy, **TERMS),
}
SHAPES = st.lists(st.integers(0, 5), min_size=0, max_size=5)


def random_case(seed, lengths, counted, spread, weighted):
    """A batch with responses of these lengths, and float64 outputs of it."""
    generator = np.random.default_rng(seed)
    responses = Ragged.from_rows([np.arange(length) for length in lengths], np.int32)
    total = len(responses.values)

    def floats(values):
        return responses.with_values(np.asarray(values, np.float32))

    old = -generator.exponential(1.5, total)
    batch = Batch(
        prompts=[[1]],
        prompt_index=np.zeros(len(lengths), np.int32),
        responses=responses,
        temperature=np.ones(len(lengths), np.float32),
        mask=responses.with_values((generator.random(total) < counted).astype(np.uint8)),
        advantages=floats(generator.normal(size=total) * (generator.random(total) > 0.3)),
        old_logprobs=floats(old),
        ref_logprobs=floats(old + generator.normal(size=total) * spread),
        importance_weights=floats(generator.exponential(1.0, total)) if weighted else None,
    )
    outputs = {
        "logprobs": old + generator.normal(size=total) * spread,
        "entropy": generator.exponential(1.0, total),
    }
    return batch, outputs


def by_autograd(loss, batch, outputs):
    """The oracle's value and derivatives, flat."""
    padded = {"mask": torch.from_numpy(batch.mask.to_padded())}
    for name in FIELDS:
        field = getattr(batch, name)
        padded[name] = None if field is None else torch.from_numpy(field.to_padded()).double()
    leaves = {
        name: torch.from_numpy(batch.responses.with_values(values).to_padded()).requires_grad_()
        for name, values in outputs.items()
    }
    value = oracle(loss, padded, leaves)
    grads = torch.autograd.grad(value, [leaves[name] for name in outputs], allow_unused=True)
    place = torch.from_numpy(batch.responses.padding_mask())
    flat = {
        name: np.zeros(len(outputs[name])) if grad is None else grad[place].numpy()
        for name, grad in zip(outputs, grads, strict=True)
    }
    return value.item(), flat


def with_numpy(loss, batch, outputs):
    arrays = losses.LossBatch.from_batch(batch, lambda array: array, dtype=np.float64)
    return losses.evaluate(loss, arrays, outputs)


def with_torch(loss, batch, outputs, requires_grad=False):
    dtype = next(iter(outputs.values())).dtype
    arrays = losses.LossBatch.from_batch(batch, torch.as_tensor, dtype=dtype)
    tensors = {
        name: torch.from_numpy(values.copy()).requires_grad_(requires_grad)
        for name, values in outputs.items()
    }
    return losses.evaluate(loss, arrays, tensors)


def assert_close(found, expected, relative, what):
    scale = np.abs(expected).max(initial=0.0)
    np.testing.assert_allclose(found, expected, rtol=relative, atol=relative * scale, err_msg=what)


def check_against_autograd(loss, batch, outputs, relative=1e-9):
    value, slopes = by_autograd(loss, batch, outputs)
    found = with_numpy(loss, batch, outputs)
    # a sum of cancelling terms is as exact as its largest term
    terms = sum(abs(slope * outputs[name]).sum() for name, slope in slopes.items())
    assert found.value == pytest.approx(value, rel=relative, abs=relative * (1e-3 + terms))
    assert set(found.derivatives) == loss.required_outputs
    for name, derivative in found.derivatives.items():
        assert_close(derivative, slopes[name], relative, f"{loss} by {name}")


# -- tests ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(LOSSES))
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_value_and_derivatives_are_those_of_autograd(name, data):
    loss = data.draw(LOSSES[name])
    batch, outputs = random_case(
        data.draw(st.integers(0, 2**32 - 1)),
        data.draw(SHAPES),
        counted=data.draw(st.sampled_from([0.0, 0.3, 0.7, 1.0])),
        spread=data.draw(st.sampled_from([0.01, 0.4, 5.0, 30.0])),
        weighted=data.draw(st.booleans()),
    )
    check_against_autograd(loss, batch, outputs)


@pytest.mark.parametrize("name", sorted(LOSSES))
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_numpy_and_torch_give_the_same(name, data):
    loss = data.draw(LOSSES[name])
    batch, outputs = random_case(
        data.draw(st.integers(0, 2**32 - 1)),
        data.draw(SHAPES),
        counted=data.draw(st.sampled_from([0.0, 0.7])),
        spread=data.draw(st.sampled_from([0.4, 30.0])),
        weighted=data.draw(st.booleans()),
    )
    on_numpy, on_torch = with_numpy(loss, batch, outputs), with_torch(loss, batch, outputs)
    terms = sum(np.abs(d * outputs[n]).sum() for n, d in on_numpy.derivatives.items())
    assert on_torch.value == pytest.approx(on_numpy.value, rel=1e-12, abs=1e-12 * (1 + terms))
    for output, derivative in on_torch.derivatives.items():
        assert isinstance(derivative, torch.Tensor)
        assert_close(derivative.numpy(), on_numpy.derivatives[output], 1e-12, output)
    assert losses.metric_values(on_torch.metrics) == pytest.approx(
        losses.metric_values(on_numpy.metrics), rel=1e-11, abs=1e-12
    )


CORNERS = [
    losses.PPO(clip_low=0.0, clip_high=0.0),
    losses.PPO(clip_low=0.5, clip_high=1.0),
    losses.PPO(clip_low=0.5, clip_high=1.0, dual_clip=4.0),
    losses.PPO(clip_low=0.5, clip_high=1.0, dual_clip=4.0, ratio="sequence"),
    losses.PPO(clip_low=0.5, clip_high=8.0, dual_clip=2.0),
    losses.PPO(clip_low=1.0, clip_high=9.0, log_ratio_clamp=(np.log(0.5), np.log(4.0))),
    losses.CISPO(clip_low=0.5, clip_high=1.0),
    losses.ImportanceSampling(log_ratio_clamp=(np.log(0.5), np.log(4.0))),
    *(
        losses.CrossEntropy(kl=losses.KL(1.0, estimator=estimator, log_ratio_clamp=np.log(2.0)))
        for estimator in ("k1", "k2", "k3", "abs", "k3+")
    ),
]


@pytest.mark.parametrize("loss", CORNERS)
def test_subgradients_at_corners_are_those_of_autograd(loss):
    ratios = [0.25, 0.5, 1.0, 2.0, 4.0, 6.0]
    rows = [[ratio] for ratio in ratios for _ in range(3)]
    responses = Ragged.from_rows([[1]] * len(rows), np.int32)
    batch = Batch(
        prompts=[[1]],
        prompt_index=np.zeros(len(rows), np.int32),
        responses=responses,
        temperature=1.0,
        advantages=[[sign] for _ in ratios for sign in (-1.0, 0.0, 1.0)],
        old_logprobs=responses.with_values(np.zeros(len(rows), np.float32)),
        ref_logprobs=responses.with_values(np.zeros(len(rows), np.float32)),
    )
    logprobs = np.log(np.concatenate(rows))
    for exponential in (np.exp(logprobs), torch.exp(torch.from_numpy(logprobs)).numpy()):
        assert set(exponential) >= {0.5, 1.0, 2.0, 4.0}  # exact, so the corners are hit
    check_against_autograd(loss, batch, {"logprobs": logprobs})


def test_outputs_that_require_grad_build_no_graph():
    batch, outputs = random_case(1, [3, 2], 1.0, 0.3, True)
    loss = losses.PPO(ratio="sequence", kl=losses.KL(0.1), entropy=losses.Entropy(0.1))
    value = with_torch(loss, batch, outputs, requires_grad=True)
    assert isinstance(value.value, float)
    assert not any(derivative.requires_grad for derivative in value.derivatives.values())


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_float32_on_torch_stays_float32_and_close(name):
    batch, outputs = random_case(2, [5, 1, 0, 4], 0.8, 0.4, True)
    loss = attrs.evolve(losses.LOSSES[name](), kl=losses.KL(0.1), entropy=losses.Entropy(0.1))
    narrow = {output: values.astype(np.float32) for output, values in outputs.items()}
    wide = with_numpy(loss, batch, {n: v.astype(np.float64) for n, v in narrow.items()})
    value = with_torch(loss, batch, narrow)
    assert value.value == pytest.approx(wide.value, rel=1e-5)
    for output, derivative in value.derivatives.items():
        assert derivative.dtype == torch.float32
        assert_close(derivative.numpy(), wide.derivatives[output], 1e-5, output)


def test_cotangents_on_torch_follow_the_output():
    batch, outputs = random_case(3, [2, 1], 0.0, 0.3, False)
    held = losses.Cotangents({"logprobs": [[1.0, -2.0], [0.5]]}, version=0)
    held.values["logprobs"].values.flags.writeable = False
    value = with_torch(held, batch, outputs)
    assert value.derivatives["logprobs"].dtype == torch.float64
    assert value.derivatives["logprobs"].tolist() == [1.0, -2.0, 0.5]


def test_read_only_fields_reach_torch_without_a_warning(recwarn):
    batch, outputs = random_case(4, [2, 1], 1.0, 0.3, True)
    for name in ("mask", *FIELDS):
        getattr(batch, name).values.flags.writeable = False
    batch.responses.offsets.flags.writeable = False
    with_torch(losses.PPO(), batch, {n: v.astype(np.float32) for n, v in outputs.items()})
    assert not recwarn.list


@pytest.mark.parametrize("lengths", [[], [0], [3, 0, 0, 2, 0], [0, 0, 4]])
def test_segment_sum_of_numpy_and_torch(lengths):
    rows = [np.arange(length, dtype=np.float64) + 1 for length in lengths]
    ragged = Ragged.from_rows(rows, np.float64)
    expected = [row.sum() for row in rows]
    assert losses.segment_sum(ragged.values, ragged.offsets).tolist() == expected
    tensors = torch.from_numpy(ragged.values), torch.from_numpy(ragged.offsets)
    assert losses.segment_sum(*tensors).tolist() == expected
