"""Each loss that maps to one of verl's by name, against verl's own function on the same batch."""

import inspect
import os
import re

import numpy as np
import pytest
import torch

from remote_rl import losses
from remote_rl.types import Batch, Ragged

os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")

from verl.trainer.ppo import core_algos
from verl.workers.config import FSDPActorConfig

# relative to the largest gradient; float64 is not exact either, since verl builds some constants
# (masks, token counts) in float32
TOLERANCE = {np.float32: 1e-5, np.float64: 1e-12}

WIDTH = 9
AGGREGATIONS = {
    "token-mean": losses.token_mean(),
    "token-sum": losses.sum(),
    "seq-mean-token-sum": losses.sequence_mean_token_sum(),
    "seq-mean-token-mean": losses.sequence_mean_token_mean(),
    "seq-mean-token-sum-norm": losses.sequence_mean_token_sum_norm(width=WIDTH),
}
# verl's loss_mode -> (the actor's configuration, the same as a loss)
POLICIES = {
    "vanilla": (
        {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0},
        losses.PPO(clip_low=0.2, clip_high=0.28, dual_clip=3.0),
    ),
    "gspo": (
        {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1},
        losses.PPO(ratio="sequence", clip_low=0.05, clip_high=0.1, log_ratio_clamp=(None, 10)),
    ),
    "cispo": (
        {"clip_ratio_low": 10.0, "clip_ratio_high": 0.2},
        losses.CISPO(clip_low=10.0, clip_high=0.2),
    ),
    "gpg": ({}, losses.Reinforce()),
}
ESTIMATORS = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "k2+": "k2",
    "mse+": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
    "kl+": "k1+",
    "k1+": "k1+",
    "abs+": "abs+",
    "low_var_kl+": "k3+",
    "k3+": "k3+",
}


def make_case(dtype, spread=0.4, weighted=True, seed=0):
    """Padded [rows, WIDTH] tensors for verl and the same as a Batch with flat outputs."""
    generator = np.random.default_rng(seed)
    lengths = [9, 4, 1, 6, 3, 7]
    shape = (len(lengths), WIDTH)
    present = np.arange(WIDTH) < np.array(lengths)[:, None]
    mask = (generator.random(shape) < 0.8) & present
    mask[3] = False  # a row without a counted token
    advantages = generator.normal(size=shape) * (generator.random(shape) > 0.2)
    old = -generator.exponential(1.0, shape)
    columns = {
        "advantages": advantages,
        "old_logprobs": old,
        "ref_logprobs": old + generator.normal(size=shape) * spread,
        "importance_weights": generator.exponential(1.0, shape),
    }
    if not weighted:
        del columns["importance_weights"]
    columns = {name: column.astype(np.float32) for name, column in columns.items()}
    outputs = {
        "logprobs": (old + generator.normal(size=shape) * spread).astype(np.float32),
        "entropy": generator.exponential(1.0, shape).astype(np.float32),
    }
    batch = Batch(
        prompts=[[1]],
        prompt_index=np.zeros(len(lengths), np.int32),
        responses=Ragged.from_padded(np.ones(shape, np.int32), present),
        temperature=1.0,
        mask=Ragged.from_padded(mask.astype(np.uint8), present),
        **{name: Ragged.from_padded(column, present) for name, column in columns.items()},
    )
    padded = {name: torch.from_numpy(column.astype(dtype)) for name, column in columns.items()} | {
        "mask": torch.from_numpy(mask)
    }
    leaves = {
        name: torch.from_numpy(values.astype(dtype)).requires_grad_()
        for name, values in outputs.items()
    }
    flat = {name: values[present].astype(dtype) for name, values in outputs.items()}
    return batch, padded, leaves, flat, present


def actor_config(**fields):
    config = FSDPActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        use_dynamic_bsz=False,
        **fields,
    )
    config.global_batch_info.clear()
    return config


def verl_policy(mode, config, mode_of_aggregation, padded, logprobs):
    return core_algos.get_policy_loss_fn(mode)(
        old_log_prob=padded["old_logprobs"],
        log_prob=logprobs,
        advantages=padded["advantages"],
        response_mask=padded["mask"],
        loss_agg_mode=mode_of_aggregation,
        config=config,
        rollout_is_weights=padded.get("importance_weights"),
    )


def evaluate(loss, batch, flat, dtype, namespace):
    if namespace == "numpy":
        arrays = losses.LossBatch.from_batch(batch, lambda array: array, dtype=dtype)
        return losses.evaluate(loss, arrays, flat)
    arrays = losses.LossBatch.from_batch(batch, torch.as_tensor, dtype=dtype)
    tensors = {name: torch.from_numpy(values.copy()) for name, values in flat.items()}
    return losses.evaluate(loss, arrays, tensors)


def compare(found, value, leaves, present, dtype):
    """Value and every gradient of verl's `value` against ours."""
    tolerance = TOLERANCE[dtype]
    names = list(found.derivatives)
    grads = torch.autograd.grad(value, [leaves[name] for name in names], allow_unused=True)
    assert found.value == pytest.approx(value.item(), rel=tolerance, abs=tolerance)
    for name, grad in zip(names, grads, strict=True):
        expected = grad.numpy()[present]
        largest = np.abs(expected).max()
        assert largest > 0
        found_slopes = np.asarray(found.derivatives[name])
        np.testing.assert_allclose(
            found_slopes, expected, rtol=0, atol=tolerance * largest, err_msg=name
        )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("namespace", ["numpy", "torch"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("mode", POLICIES)
@pytest.mark.parametrize("spread", [0.4, 15.0])
@pytest.mark.parametrize("weighted", [True, False])
def test_policy_losses(mode, aggregation, namespace, dtype, spread, weighted):
    batch, padded, leaves, flat, present = make_case(dtype, spread, weighted)
    fields, loss = POLICIES[mode]
    config = actor_config(**fields)
    value, metrics = verl_policy(mode, config, aggregation, padded, leaves["logprobs"])
    loss = losses.resolve(
        type(loss)(**{**as_fields(loss), "aggregation": AGGREGATIONS[aggregation]}), batch
    )
    found = evaluate(loss, batch, flat, dtype, namespace)
    compare(found, value, leaves, present, dtype)
    ours = losses.metric_values(found.metrics)
    names = {
        "actor/pg_clipfrac": "clip_fraction",
        "actor/pg_clipfrac_lower": "clip_fraction_dual",
        "actor/ppo_kl": "approximate_kl_k1",
    }
    for verl_name, name in names.items():
        if verl_name in metrics:
            expected = pytest.approx(metrics[verl_name], rel=1e-5, abs=1e-6)
            assert ours.get(name, 0.0) == expected, name


def as_fields(loss):
    return {field.name: getattr(loss, field.name) for field in loss.__attrs_attrs__}


@pytest.mark.parametrize("mode", POLICIES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_global_batch_numbers_are_the_denominator(mode, aggregation):
    dtype = np.float64
    batch, padded, leaves, flat, present = make_case(dtype)
    fields, loss = POLICIES[mode]
    config = actor_config(**fields)
    config.global_batch_info.update(batch_num_tokens=101, global_batch_size=16, dp_size=1)
    value, _ = verl_policy(mode, config, aggregation, padded, leaves["logprobs"])
    chosen = {
        "token-mean": losses.token_mean(101),
        "token-sum": losses.sum(),
        "seq-mean-token-sum": losses.sequence_mean_token_sum(16),
        "seq-mean-token-mean": losses.sequence_mean_token_mean(16),
        "seq-mean-token-sum-norm": losses.sequence_mean_token_sum_norm(WIDTH, 16),
    }[aggregation]
    loss = type(loss)(**{**as_fields(loss), "aggregation": chosen})
    compare(evaluate(loss, batch, flat, dtype, "numpy"), value, leaves, present, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("spread", [0.4, 15.0])
def test_kl_and_entropy_as_the_actor_adds_them(name, aggregation, dtype, spread):
    batch, padded, leaves, flat, present = make_case(dtype, spread)
    value, _ = verl_policy("gpg", actor_config(), aggregation, padded, leaves["logprobs"])

    def aggregate(matrix):
        return core_algos.agg_loss(matrix, padded["mask"], aggregation)

    estimates = core_algos.kl_penalty(leaves["logprobs"], padded["ref_logprobs"], name)
    value = value + 2.0 * aggregate(estimates) - 0.5 * aggregate(leaves["entropy"])
    ours = AGGREGATIONS[aggregation]
    loss = losses.Reinforce(
        aggregation=ours,
        kl=losses.KL(2.0, estimator=ESTIMATORS[name], aggregation=ours),
        entropy=losses.Entropy(0.5, aggregation=ours),
    )
    found = evaluate(loss, batch, flat, dtype, "numpy")
    compare(found, value, leaves, present, dtype)
    expected = aggregate(estimates).item()
    assert losses.metric_values(found.metrics)["kl_loss"] == pytest.approx(
        expected, rel=TOLERANCE[dtype], abs=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_supervised_loss(dtype):
    batch, padded, leaves, flat, present = make_case(dtype, weighted=False)
    value = core_algos.agg_loss(-leaves["logprobs"], padded["mask"], "token-mean")
    found = evaluate(losses.CrossEntropy(), batch, flat, dtype, "numpy")
    compare(found, value, leaves, present, dtype)


def nested_case(batch, leaves, present):
    """The jagged TensorDict that verl's V1 actor gets, and its model output: slot i of a row
    scores token i + 1, prompts are two tokens long."""
    from tensordict import TensorDict

    rows, prompt = len(batch), 2

    def jagged(ragged):
        parts = [torch.from_numpy(row.copy()) for row in ragged]
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    def scored(leaf):
        responses = [leaf[row][torch.from_numpy(present[row])] for row in range(rows)]
        padded = [
            torch.cat([row.new_zeros(prompt - 1), row, row.new_zeros(1)]) for row in responses
        ]
        return torch.nested.as_nested_tensor(padded, layout=torch.jagged)

    columns = {
        "prompts": Ragged.from_rows([[1] * prompt] * rows, np.int64),
        "responses": batch.responses,
        "response_mask": batch.mask,
        "old_log_probs": batch.old_logprobs,
        "advantages": batch.advantages,
        "ref_log_prob": batch.ref_logprobs,
        "rollout_is_weights": batch.importance_weights,
    }
    data = TensorDict({name: jagged(column) for name, column in columns.items()}, [rows])
    return data, {
        "log_probs": scored(leaves["logprobs"]),
        "entropy": scored(leaves["entropy"]),
    }


@pytest.mark.parametrize("mode", POLICIES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_actor_s_whole_loss(mode, aggregation):
    from verl.utils import tensordict_utils
    from verl.workers.utils.losses import ppo_loss

    dtype = np.float32
    batch, _, leaves, flat, present = make_case(dtype)
    fields, loss = POLICIES[mode]
    config = actor_config(
        **fields,
        loss_agg_mode=aggregation,
        entropy_coeff=0.03,
        use_kl_loss=True,
        kl_loss_coef=0.2,
        kl_loss_type="low_var_kl",
        loss_scale_factor=WIDTH,
        policy_loss={"loss_mode": mode},
    )
    data, model_output = nested_case(batch, leaves, present)
    sizes = {"dp_size": 1, "batch_num_tokens": 40, "global_batch_size": 12}
    tensordict_utils.assign_non_tensor(data, **sizes)
    value, _ = ppo_loss(config, model_output, data)
    ours = {
        "token-mean": losses.token_mean(40),
        "token-sum": losses.sum(),
        "seq-mean-token-sum": losses.sequence_mean_token_sum(12),
        "seq-mean-token-mean": losses.sequence_mean_token_mean(12),
        "seq-mean-token-sum-norm": losses.sequence_mean_token_sum_norm(WIDTH, 12),
    }[aggregation]
    changed = {
        "aggregation": ours,
        "kl": losses.KL(0.2, aggregation=ours),
        "entropy": losses.Entropy(0.03, aggregation=ours),
    }
    found = evaluate(type(loss)(**{**as_fields(loss), **changed}), batch, flat, dtype, "torch")
    compare(found, value, leaves, present, dtype)


def test_verl_has_no_mode_that_this_file_forgets():
    """A new policy loss or aggregation in verl shows up here first."""
    without_a_name = {  # these go through losses.custom, by verl's own function
        *("dppo_tv", "dppo_kl", "sapo", "clip_cov", "kl_cov", "geo_mean", "dro", "bypass_mode")
    }
    assert set(core_algos.POLICY_LOSS_REGISTRY) == set(POLICIES) | without_a_name
    source = inspect.getsource(core_algos.agg_loss)
    assert set(re.findall(r'"((?:token|seq)-[a-z-]+)"', source)) == set(AGGREGATIONS)
