"""Testing: the values that losses report (imports numpy, the contract, losses, base, checks,
probe)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from ... import losses
from ...errors import InvalidRequestError
from ...types import Batch, Ragged
from .base import Conformance
from .checks import cotangents_of, refuses
from .probe import Probe

#: every aggregation with a denominator, from its denominator on; width 4 where it takes one
AGGREGATIONS: Mapping[str, Callable[[float | None], losses.Aggregation]] = {
    "token_mean": losses.token_mean,
    "sequence_mean_token_sum": losses.sequence_mean_token_sum,
    "sequence_mean_token_mean": losses.sequence_mean_token_mean,
    "sequence_mean_token_sum_norm": lambda denominator: losses.sequence_mean_token_sum_norm(
        4.0, denominator
    ),
}
#: every loss with a formula, with the terms that it can add
FORMULAS: Mapping[str, losses.FormulaLoss] = {
    "CrossEntropy": losses.CrossEntropy(),
    "Reinforce": losses.Reinforce(aggregation="sequence_mean_token_sum"),
    "PPO": losses.PPO(clip_low=0.1, clip_high=0.3, dual_clip=1.5, kl=losses.KL(0.05)),
    "PPO of sequence ratios": losses.PPO(
        ratio="sequence", aggregation="sequence_mean_token_mean", entropy=losses.Entropy(0.1)
    ),
    "CISPO": losses.CISPO(kl=losses.KL(0.1, estimator="k2"), scale=0.5),
    "ImportanceSampling": losses.ImportanceSampling(aggregation="sum", log_ratio_clamp=None),
}


class LossValues(Conformance):
    """What forward_backward reports, against the one implementation of losses and by algebra."""

    @pytest.mark.parametrize("name", FORMULAS)
    def test_a_loss_reports_what_its_formula_gives(self, probe: Probe, name: str) -> None:
        """Value and metrics are those that `remote_rl.losses` computes of a forward's outputs."""
        loss = FORMULAS[name]
        probe.needs("forward", "forward_backward", "zero_grad", loss=type(loss).__name__)
        for output in sorted(loss.required_outputs):
            probe.needs(output=output)
        batch = _with_old_logprobs(probe, probe.batch())
        outputs = probe.rl.training.forward(batch, loss.required_outputs).result()
        fields = losses.LossBatch.from_batch(batch, lambda array: array, np.float64)
        flat = {name: rows.values.astype(np.float64) for name, rows in outputs.values.items()}
        wanted = losses.evaluate(losses.resolve(loss, batch), fields, flat)
        result = probe.rl.training.forward_backward(batch, loss).result()
        probe.rl.training.zero_grad().result()
        probe.same(result.value, wanted.value, f"value of {name}")
        for metric, value in losses.metric_values(wanted.metrics).items():
            if metric in result.metrics:
                probe.same(result.metrics[metric], value, f"metric {metric!r} of {name}")

    @pytest.mark.parametrize("name", FORMULAS)
    def test_masks_and_weights_hold_for_every_term(self, probe: Probe, name: str) -> None:
        """A masked token adds nothing to any term of a loss, its KL and entropy included, and its
        importance weight multiplies the term; the gradient is the formula's, too."""
        loss: losses.FormulaLoss = FORMULAS[name]
        probe.needs("forward", "forward_backward", "zero_grad", loss=type(loss).__name__)
        for output in sorted(loss.required_outputs):
            probe.needs(output=output)
        # of single tokens, where a shift of the forward's outputs changes nothing
        batch = _with_old_logprobs(probe, probe.singles().select([0, 1, 2, 4])).replace(
            advantages=[1.0, -0.5, 0.75, -1.25],
            mask=[[1], [1], [0], [1]],
            importance_weights=[2.0, 0.0, 1.0, 0.5],
        )
        loss = losses.resolve(loss, batch)  # denominators have a test of their own
        outputs = probe.rl.training.forward(batch, loss.required_outputs).result()
        fields = losses.LossBatch.from_batch(batch, lambda array: array, np.float64)
        flat = {name: rows.values.astype(np.float64) for name, rows in outputs.values.items()}
        wanted = losses.evaluate(loss, fields, flat)
        if not probe.offers("operation", "optim_step") or not probe.offers("loss", "Cotangents"):
            probe.same(probe.value(batch, loss), wanted.value, f"value of {name} with a mask")
            return
        # before a step, which gives the weights another version
        own = probe.gradient_norm(batch, cotangents_of(batch, loss, outputs))
        value, norm = probe.measured(batch, loss)
        probe.same(value, wanted.value, f"value of {name} with a mask")
        probe.same_norm(norm, own, f"gradient norm of {name} with a mask")

    @pytest.mark.parametrize("kind", AGGREGATIONS)
    def test_denominators_count_what_the_mask_counts(self, probe: Probe, kind: str) -> None:
        """Denominators are of tokens with mask 1 and of rows that have one, never of all."""
        probe.needs("forward_backward", "optim_step", "zero_grad", loss="CrossEntropy")
        mask = [[1, 0, 1], [0, 0], [1, 0, 0, 0], [1]]
        batch = probe.batch().replace(mask=mask)
        rows = [_one_row(batch, row) for row in range(4)]
        sums = [probe.value(row, losses.CrossEntropy(aggregation="sum")) for row in rows]
        parts = {
            "token_mean": sum(sums) / 4,
            "sequence_mean_token_sum": sum(sums) / 3,
            "sequence_mean_token_mean": (sums[0] / 2 + sums[2] + sums[3]) / 3,
            "sequence_mean_token_sum_norm": sum(sums) / 3 / 4,
        }
        loss = losses.CrossEntropy(aggregation=AGGREGATIONS[kind](None))
        value, norm = probe.measured(batch, loss)
        probe.same(value, parts[kind], f"{kind} with a mask")
        count = 4.0 if kind == "token_mean" else 3.0
        said = losses.CrossEntropy(aggregation=AGGREGATIONS[kind](count))
        wanted = probe.gradient_norm(batch, said)
        probe.same_norm(norm, wanted, f"gradient norm of {kind}, with the denominator left open")

    def test_masked_and_empty_rows_contribute_nothing(self, probe: Probe) -> None:
        """A row without a counted token adds nothing to value and gradient."""
        probe.needs("forward_backward", "optim_step", "zero_grad", loss="CrossEntropy")
        batch, loss = probe.batch(), losses.CrossEntropy(aggregation="sum")
        ids = [row.tolist() for row in batch.responses]
        more = Batch(
            prompts=batch.prompts,
            prompt_index=[0, 0, 1, 2, 1, 2],
            responses=[*ids, [], probe.ids(3, seed=4)],
            mask=[[1] * len(row) for row in ids] + [[], [0, 0, 0]],
            temperature=1.0,
        )
        value, norm = probe.measured(more, loss)
        wanted_value, wanted_norm = probe.measured(batch, loss)
        probe.same(value, wanted_value, "value")
        probe.same_norm(norm, wanted_norm, "gradient norm")

    def test_a_batch_in_which_nothing_counts_is_worth_zero(self, probe: Probe) -> None:
        """Without any counted token value and gradient are zero, not undefined."""
        probe.needs("forward_backward", "optim_step", loss="CrossEntropy")
        batch = probe.batch()
        nothing = batch.replace(mask=[[0] * len(row) for row in batch.responses])
        result = probe.rl.training.forward_backward(nothing, losses.CrossEntropy()).result()
        assert result.value == 0, f"value {result.value}"
        norm = probe.applied_norm()
        assert norm == 0, f"gradient norm {norm}"

    def test_importance_weights_multiply_and_never_divide(self, probe: Probe) -> None:
        """Importance weights multiply each token's term and stay out of the denominators."""
        probe.needs("forward_backward", "optim_step", "zero_grad", loss="CrossEntropy")
        batch, loss = probe.batch(), losses.CrossEntropy()
        rows = [
            probe.value(_one_row(batch, row), losses.CrossEntropy(aggregation="sum"))
            for row in range(4)
        ]
        weights = [2.0, 0.0, 0.5, 1.0]
        weighted = batch.replace(importance_weights=weights)
        wanted = float(np.dot(rows, weights)) / len(batch.responses.values)
        probe.same(probe.value(weighted, loss), wanted, "value with importance weights")
        norm = probe.gradient_norm(batch, loss)
        doubled = probe.gradient_norm(batch.replace(importance_weights=[2.0] * 4), loss)
        probe.same_norm(doubled, 2 * norm, "gradient norm with importance weights of 2")

    def test_a_scale_multiplies_value_and_gradient(self, probe: Probe) -> None:
        """`scale` multiplies the whole loss and its gradient."""
        probe.needs("forward_backward", "optim_step", "zero_grad", loss="CrossEntropy")
        batch, plain, scaled = probe.batch(), losses.CrossEntropy(), losses.CrossEntropy(scale=-3.0)
        value, norm = probe.measured(batch, scaled)
        wanted_value, wanted_norm = probe.measured(batch, plain)
        probe.same(value / -3, wanted_value, "value / scale")
        probe.same_norm(norm, 3 * wanted_norm, "gradient norm")

    def test_a_loss_without_a_field_it_needs_is_refused_by_name(self, probe: Probe) -> None:
        """A loss on a batch that lacks a field it reads is refused, naming loss and field."""
        probe.needs("forward_backward")
        for name, loss in FORMULAS.items():
            cls = type(loss).__name__
            if not loss.required_fields or not probe.offers("loss", cls) or " " in name:
                continue
            field = min(loss.required_fields)
            bare = probe.batch().replace(advantages=None)
            with refuses(InvalidRequestError, cls, field):
                probe.rl.training.forward_backward(bare, loss).result()


def _one_row(batch: Batch, row: int) -> Batch:
    return batch.select([row])


def _with_old_logprobs(probe: Probe, batch: Batch) -> Batch:
    """The batch with other logprobs near the policy's own, and constant within each row."""
    rows = probe.rl.training.forward(batch).result().logprobs
    means = np.array([row.mean() for row in rows])

    def constant(values: np.ndarray) -> Ragged:
        return rows.with_values(np.repeat(values, rows.lengths).astype(np.float32))

    shift = np.array([0.05, -0.4, 0.5, -0.02])
    return batch.replace(old_logprobs=constant(means + shift), ref_logprobs=constant(means - shift))
