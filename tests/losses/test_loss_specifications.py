"""Loss specifications as data: what they accept, refuse by name, and say they need."""

import pickle

import attrs
import numpy as np
import pytest

from remote_rl import losses
from remote_rl.errors import InvalidRequestError, UnknownNameError
from remote_rl.types import Batch, Ragged


def batch_of(**fields):
    responses = Ragged.from_rows([[1, 2, 3], [], [4, 5]], np.int32)
    for name, value in fields.items():
        if isinstance(value, float):
            fields[name] = responses.with_values(np.full(5, value, np.float32))
    return Batch(
        prompts=[[7]], prompt_index=[0, 0, 0], responses=responses, temperature=1.0, **fields
    )


FORMULA_LOSSES = [each for each in losses.LOSSES.values() if each is not losses.Cotangents]


def test_names_are_unique_and_stable():
    assert set(losses.LOSSES) == {
        "ppo",
        "cispo",
        "importance_sampling",
        "reinforce",
        "cross_entropy",
        "cotangents",
    }
    assert losses.sum() == losses.Aggregation(kind="sum")


@pytest.mark.parametrize("loss_class", FORMULA_LOSSES)
def test_unknown_field_gets_the_nearest_name(loss_class):
    with pytest.raises(UnknownNameError, match="did you mean 'aggregation'"):
        loss_class(agregation="sum")


@pytest.mark.parametrize("loss_class", FORMULA_LOSSES)
def test_losses_are_frozen_values_that_pickle(loss_class):
    loss = loss_class(kl=losses.KL(0.1), entropy=losses.Entropy(0.01), scale=0.5)
    assert pickle.loads(pickle.dumps(loss)) == loss
    assert attrs.evolve(loss, scale=1.0) != loss
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        loss.scale = 2.0


def test_every_field_says_what_it_is():
    for each in (*losses.LOSSES.values(), losses.KL, losses.Entropy, losses.Aggregation):
        for field in attrs.fields(each):
            assert field.metadata.get("remote_rl.kind") == "semantic", (each, field.name)


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: losses.PPO(clip_low=-0.1), "clip_low"),
        (lambda: losses.PPO(clip_high=float("nan")), "clip_high"),
        (lambda: losses.PPO(clip_high=None), "clip_high"),
        (lambda: losses.PPO(dual_clip=1.0), "dual_clip"),
        (lambda: losses.PPO(ratio="sequences"), "'sequence'"),
        (lambda: losses.PPO(log_ratio_clamp=0), "log_ratio_clamp"),
        (lambda: losses.PPO(log_ratio_clamp=(3, 2)), "log_ratio_clamp"),
        (lambda: losses.PPO(log_ratio_clamp=(1, 2, 3)), "log_ratio_clamp"),
        (lambda: losses.PPO(log_ratio_clamp="wide"), "log_ratio_clamp"),
        (lambda: losses.PPO(aggregation="token_meen"), "'token_mean'"),
        (lambda: losses.PPO(aggregation="sequence_mean_token_sum_norm"), "width"),
        (lambda: losses.PPO(aggregation=3), "aggregation"),
        (lambda: losses.PPO(kl=0.1), "losses.KL"),
        (lambda: losses.PPO(entropy=0.1), "losses.Entropy"),
        (lambda: losses.PPO(scale=float("inf")), "scale"),
        (lambda: losses.KL(), "coef"),
        (lambda: losses.KL(0.1, estimator="k4"), "estimator"),
        (lambda: losses.KL(0.1, value_clamp=0), "value_clamp"),
        (lambda: losses.Entropy("much"), "coef"),
        (lambda: losses.token_mean(0), "denominator"),
        (lambda: losses.Aggregation(kind="sum", denominator=3), "denominator"),
        (lambda: losses.Aggregation(kind="token_mean", width=3), "width"),
        (lambda: losses.sequence_mean_token_sum_norm(width=0), "width"),
        (lambda: losses.Cotangents({}, version=0), "values"),
        (lambda: losses.Cotangents({"logprobs": [[1.0]]}, version=-1), "version"),
        (lambda: losses.Cotangents({"logprobs": [[1.0, float("nan")]]}, version=0), "row 0"),
        (lambda: losses.Cotangents({"a": [[1.0]], "b": [[1.0, 2.0]]}, version=0), "'b'"),
        (lambda: losses.custom("not a function"), "function"),
        (lambda: losses.custom(len, outputs=()), "outputs"),
        (lambda: losses.custom(len, framework="jax"), "framework"),
    ],
)
def test_what_is_wrong_is_named(build, named):
    with pytest.raises(InvalidRequestError) as caught:
        build()
    assert named in str(caught.value)


def test_numbers_of_numpy_become_plain_ones():
    loss = losses.PPO(clip_low=np.float32(0.5), log_ratio_clamp=[None, np.int64(10)])
    assert type(loss.clip_low) is float
    assert loss.log_ratio_clamp == (None, 10)
    assert losses.PPO(log_ratio_clamp=20) == losses.PPO()


def test_default_clamps_of_each_estimator():
    assert losses.KL(1.0).log_ratio_clamp == (-20.0, 20.0)
    assert losses.KL(1.0).value_clamp == 10.0
    assert losses.KL(1.0, estimator="k3+").value_clamp == 10.0
    assert losses.KL(1.0, estimator="k1").log_ratio_clamp is None
    assert losses.KL(1.0, value_clamp=None).value_clamp is None


def test_required_fields_and_outputs():
    assert losses.PPO().required_fields == {"advantages", "old_logprobs"}
    assert losses.PPO(kl=losses.KL(0.1)).required_fields == {
        "advantages",
        "old_logprobs",
        "ref_logprobs",
    }
    assert losses.Reinforce().required_fields == {"advantages"}
    assert losses.CrossEntropy().required_fields == frozenset()
    assert losses.CrossEntropy().required_outputs == {"logprobs"}
    assert losses.CISPO(entropy=losses.Entropy(0)).required_outputs == {"logprobs", "entropy"}
    assert losses.custom(len, {"entropy"}).required_outputs == {"entropy"}


def test_check_names_the_missing_field():
    with pytest.raises(InvalidRequestError, match=r"PPO needs Batch\.advantages"):
        losses.PPO().check(batch_of(old_logprobs=-1.0))
    with pytest.raises(InvalidRequestError, match=r"needs Batch\.ref_logprobs") as caught:
        losses.PPO(kl=losses.KL(1.0)).check(batch_of(old_logprobs=-1.0, advantages=1.0))
    assert caught.value.details["field"] == "ref_logprobs"
    losses.PPO().check(batch_of(old_logprobs=-1.0, advantages=1.0))
    losses.CrossEntropy().check(batch_of())


def test_cotangents_must_fit_the_batch():
    fits = losses.Cotangents({"logprobs": [[1.0, 2.0, 3.0], [], [4.0, 5.0]]}, version=3)
    fits.check(batch_of())
    with pytest.raises(InvalidRequestError, match="row 2"):
        losses.Cotangents({"logprobs": [[1.0, 2.0, 3.0], [], [4.0]]}, version=3).check(batch_of())
    with pytest.raises(InvalidRequestError, match="2 rows for 3"):
        losses.Cotangents({"logprobs": [[1.0], []]}, version=3).check(batch_of())
    chosen = fits.select([2, 0])
    assert chosen.values["logprobs"].to_rows() == [[4.0, 5.0], [1.0, 2.0, 3.0]]
    assert chosen.version == 3


def test_resolve_counts_the_whole_batch_and_keeps_what_is_given():
    responses = Ragged.from_rows([[1, 2, 3], [], [4, 5], [6]], np.int32)
    batch = Batch(
        prompts=[[7]],
        prompt_index=[0, 0, 0, 0],
        responses=responses,
        temperature=1.0,
        mask=[[1, 0, 1], [], [1, 1], [0]],
    )
    loss = losses.PPO(
        aggregation="sequence_mean_token_mean",
        kl=losses.KL(0.1),
        entropy=losses.Entropy(0.1, aggregation=losses.token_mean(denominator=9)),
    )
    resolved = losses.resolve(loss, batch)
    assert resolved.aggregation == losses.sequence_mean_token_mean(denominator=2)
    assert resolved.kl.aggregation == losses.token_mean(denominator=4)
    assert resolved.entropy.aggregation == losses.token_mean(denominator=9)
    assert losses.resolve(resolved, batch) == resolved
    summed = losses.PPO(aggregation="sum")
    assert losses.resolve(summed, batch) == summed
    cotangents = losses.Cotangents({"logprobs": responses}, version=0)
    assert losses.resolve(cotangents, batch) is cotangents


def test_resolve_of_a_batch_without_a_counted_token():
    batch = batch_of(mask=[[0, 0, 0], [], [0, 0]])
    assert losses.resolve(losses.PPO(), batch).aggregation.denominator == 1
