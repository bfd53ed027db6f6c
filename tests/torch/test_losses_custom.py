"""Losses in the user's own code: torch's autograd on the client, or cotangents by hand."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from remote_rl import losses
from remote_rl.errors import InvalidRequestError
from remote_rl.types import Batch, Outputs, Ragged


def a_case():
    responses = Ragged.from_rows([[1, 2, 3], [], [4, 5]], np.int32)

    def floats(values):
        return responses.with_values(np.asarray(values, np.float32))

    batch = Batch(
        prompts=[[1]],
        prompt_index=[0, 0, 0],
        responses=responses,
        temperature=1.0,
        mask=[[1, 0, 1], [], [1, 1]],
        advantages=floats([1, 2, -1, 0.5, -0.5]),
        old_logprobs=floats([-1, -2, -1, -3, -0.5]),
    )
    outputs = Outputs(
        values={
            "logprobs": floats([-1.1, -1.7, -1.3, -2.5, -0.6]),
            "entropy": floats([1, 2, 3, 4, 5]),
        },
        version=7,
    )
    return batch, outputs


def test_a_torch_function_gives_what_the_named_loss_gives():
    batch, outputs = a_case()

    def clipped(batch, outputs):
        mask = torch.tensor(batch.mask.values)
        advantages = torch.tensor(batch.advantages.values)
        ratio = torch.exp(outputs["logprobs"] - torch.tensor(batch.old_logprobs.values))
        loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
        return (loss * mask).sum() / mask.sum(), {"largest": ratio.max()}

    value, cotangents, metrics = losses.run_custom(losses.custom(clipped), batch, outputs)
    arrays = losses.LossBatch.from_batch(batch, lambda array: array)
    flat = {name: rows.values for name, rows in outputs.values.items()}
    named = losses.evaluate(losses.PPO(), arrays, flat)
    assert value == pytest.approx(named.value, rel=1e-6)
    np.testing.assert_allclose(
        cotangents.values["logprobs"].values, named.derivatives["logprobs"], rtol=1e-5
    )
    assert cotangents.version == 7
    assert metrics == {"largest": pytest.approx(np.exp(0.5), rel=1e-6)}
    applied = losses.evaluate(cotangents, arrays, flat)
    np.testing.assert_array_equal(
        applied.derivatives["logprobs"], cotangents.values["logprobs"].values
    )


def test_an_output_that_is_not_used_gets_zeros():
    batch, outputs = a_case()
    loss = losses.custom(lambda batch, outputs: outputs["entropy"].sum(), {"logprobs", "entropy"})
    value, cotangents, _ = losses.run_custom(loss, batch, outputs)
    assert value == 15
    assert cotangents.values["logprobs"].values.tolist() == [0] * 5
    assert cotangents.values["entropy"].values.tolist() == [1] * 5


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_runs_where_grad_is_off_and_leaves_the_outputs_alone(mode):
    batch, outputs = a_case()
    before = outputs.logprobs.values.copy()

    def squares(batch, outputs):
        return (outputs["logprobs"] ** 2).sum()

    with mode():
        _, cotangents, _ = losses.run_custom(losses.custom(squares), batch, outputs)
    np.testing.assert_allclose(cotangents.values["logprobs"].values, 2 * before)
    np.testing.assert_array_equal(outputs.logprobs.values, before)


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda batch, outputs: outputs["logprobs"], "scalar"),
        (lambda batch, outputs: 3.0, "scalar"),
        (lambda batch, outputs: outputs["logprobs"].detach().sum(), "detach"),
        (lambda batch, outputs: outputs["logprobs"].sum() * float("nan"), "nan"),
        (lambda batch, outputs: (outputs["logprobs"] + 1.7).abs().sqrt().sum(), "row 0"),
        (lambda batch, outputs: (outputs["logprobs"].sum(), [1]), "metrics"),
        (lambda batch, outputs: (outputs["logprobs"].sum(), {"a": "b"}), "'a'"),
    ],
)
def test_what_is_wrong_with_a_torch_function_is_named(function, named):
    batch, outputs = a_case()
    with pytest.raises(InvalidRequestError, match=named):
        losses.run_custom(losses.custom(function), batch, outputs)


def test_the_function_s_own_failure_is_not_wrapped():
    batch, outputs = a_case()

    def broken(batch, outputs):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        losses.run_custom(losses.custom(broken), batch, outputs)


def test_a_function_without_a_framework():
    batch, outputs = a_case()

    def by_hand(batch, outputs):
        assert not outputs["logprobs"].flags.writeable
        mask = batch.mask.values
        return np.sum(outputs["logprobs"] * mask), {"logprobs": mask}, {"counted": mask.sum()}

    loss = losses.custom(by_hand, {"logprobs", "entropy"}, framework=None)
    value, cotangents, metrics = losses.run_custom(loss, batch, outputs)
    assert value == pytest.approx(-1.1 - 1.3 - 2.5 - 0.6)
    assert cotangents.values["logprobs"].values.tolist() == [1, 0, 1, 1, 1]
    assert cotangents.values["entropy"].values.tolist() == [0] * 5
    assert metrics == {"counted": 4}


@pytest.mark.parametrize(
    ("result", "named"),
    [
        (1.0, "must return"),
        (([1.0], {}), "number"),
        ((1.0, [1]), "mapping"),
        ((1.0, {"entropy": np.zeros(5)}), "'entropy'"),
        ((1.0, {"logprobs": np.zeros(4)}), "shape"),
        ((1.0, {"logprobs": np.array([0, 0, 0, 0, np.inf])}), "token 1 of row 2"),
        ((np.inf, {"logprobs": np.zeros(5)}), "inf"),
    ],
)
def test_what_is_wrong_with_a_plain_function_is_named(result, named):
    batch, outputs = a_case()
    loss = losses.custom(lambda batch, outputs: result, framework=None)
    with pytest.raises(InvalidRequestError, match=named):
        losses.run_custom(loss, batch, outputs)


def test_outputs_of_another_batch_are_refused():
    batch, outputs = a_case()
    loss = losses.custom(lambda batch, outputs: outputs["logprobs"].sum())
    with pytest.raises(InvalidRequestError, match="other rows"):
        losses.run_custom(loss, batch.select([0, 2]), outputs)
    with pytest.raises(InvalidRequestError, match="entropies"):
        losses.run_custom(losses.custom(len, {"entropies"}), batch, outputs)


def test_importing_losses_imports_no_torch():
    code = "import sys, remote_rl.losses; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
