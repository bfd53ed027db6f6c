"""Testing: the gradient itself, and how it accumulates (imports numpy, the contract, losses, base,
checks, probe)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from ... import losses
from ...errors import BackendError, ConflictError, DirtyGradientsError
from ...losses import CrossEntropy
from ...requests import Abandon
from ...types import AdamW, Batch
from .base import Conformance
from .checks import cotangents_of, places, refuses, unrolled
from .probe import Probe
from .steps import downhill

#: beside a number of half precision (11 bits) this part of it is rounded away; so many of them are
#: more than a norm may differ by at a tolerance of 1e-4
_SMALL, _SMALL_ONES = 2.0**-12, 16


class Gradients(Conformance):
    """Gradients by what they do: norms, steps and sums."""

    @pytest.mark.parametrize("texts", ["short", "long"])
    def test_every_response_token_is_trained(self, probe: Probe, texts: str) -> None:
        """Each response token, the first and the last included, gives its own value and gradient:
        those it gives where what comes before it is part of the prompt, however long both are."""
        probe.needs("forward_backward", "optim_step", "zero_grad", loss="CrossEntropy")
        batch = probe.batch() if texts == "short" else probe.long_batch()
        loss, alone = CrossEntropy(aggregation="sum"), unrolled(batch)
        for place in range(len(alone)) if texts == "short" else places(batch):
            chosen = np.zeros(len(batch.responses.values), np.uint8)
            chosen[place] = 1
            only = batch.replace(mask=batch.responses.with_values(chosen))
            single = alone.select([place])
            row = int(batch.responses.row_numbers()[place])
            what = f"token {place - int(batch.responses.offsets[row])} of row {row} alone"
            value, norm = probe.measured(only, loss)
            wanted_value, wanted_norm = probe.measured(single, loss)
            probe.same(value, wanted_value, f"value of {what}")
            assert norm > 0, f"the gradient of {what} is {norm}"
            probe.same_norm(norm, wanted_norm, f"gradient norm of {what}")

    def test_the_gradient_is_the_slope_of_the_value(self, probe: Probe) -> None:
        """A small step along the gradient lowers the loss by the step times the norm squared."""
        probe.needs_training()
        # at 1 a gradient that leaves the temperature out is right
        batch, loss = probe.singles().replace(temperature=0.5), CrossEntropy()
        before, norm = probe.measured(batch, loss)
        length = 0.01 * max(1.0, before) / norm**2
        probe.train(batch, loss, **downhill(length, norm))
        fallen = before - probe.value(batch, loss)
        wanted = length * norm**2
        assert abs(fallen - wanted) <= 0.1 * wanted, (
            f"the loss fell by {fallen:.6g} where its slope promises {wanted:.6g} "
            f"(gradient norm {norm:.6g}, step {length:.6g})"
        )

    def test_a_step_on_reinforce_follows_the_advantages(self, probe: Probe) -> None:
        """Reinforce makes tokens with a positive advantage likelier, with a negative one less."""
        probe.needs_training()
        probe.needs(loss="Reinforce")
        one, other = probe.ids(2)
        batch = Batch(
            prompts=[[one]],
            prompt_index=[0, 0],
            responses=[[one], [other]],
            temperature=1.0,
            advantages=[1.0, -1.0],
        )
        before = probe.logprobs(batch)
        probe.train(batch, losses.Reinforce())
        moved = probe.logprobs(batch) - before
        assert moved[0] > 0 > moved[1], f"logprobs moved by {moved.tolist()}"

    def test_two_forward_backwards_are_one_with_both(self, probe: Probe) -> None:
        """Gradients accumulate: pieces, given the whole's denominator, add up to the whole."""
        probe.needs_training()
        batch = probe.batch()
        whole, norm = probe.measured(batch, CrossEntropy())
        piece = CrossEntropy(aggregation=losses.token_mean(len(batch.responses.values)))
        values = [
            probe.rl.training.forward_backward(part, piece) for part in batch.split([1, 0, 2, 1])
        ]
        probe.same(sum(each.result().value for each in values), whole, "sum of the pieces' values")
        probe.same_norm(probe.applied_norm(), norm, "gradient norm of the pieces together")

    def test_small_gradients_add_up_beside_a_large_one(self, probe: Probe) -> None:
        """The accumulator has at least float32's precision: many small gradients on top of a large
        one are not rounded away, as half precision would."""
        probe.needs("forward_backward", "optim_step", loss="CrossEntropy")
        batch = probe.singles()
        norm = probe.gradient_norm(batch, CrossEntropy())
        scales = [1.0] + [_SMALL] * _SMALL_ONES
        adding = [
            probe.rl.training.forward_backward(batch, CrossEntropy(scale=scale)) for scale in scales
        ]
        for each in adding:
            each.result()
        wanted = norm * sum(scales)
        probe.same_norm(probe.applied_norm(), wanted, "gradient norm of one large and many small")

    def test_every_row_counts_whatever_their_number(self, probe: Probe) -> None:
        """Rows count in value and gradient where their number divides by nothing: the same row n
        times is worth n times the row."""
        probe.needs("forward_backward", "optim_step", loss="CrossEntropy")
        batch, loss = probe.batch(), CrossEntropy(aggregation="sum")
        value, norm = probe.measured(batch.select([0]), loss)
        for count in (2, 3, 5, 7, 11):
            many, many_norm = probe.measured(batch.select([0] * count), loss)
            probe.same(many / count, value, f"value of {count} equal rows / {count}")
            probe.same_norm(many_norm, count * norm, f"gradient norm of {count} equal rows")

    def test_a_step_empties_the_accumulator(self, probe: Probe) -> None:
        """After a step the next gradient begins at zero, and a step without one is refused."""
        probe.needs("forward_backward", "optim_step", loss="CrossEntropy")
        batch = probe.batch()
        norm = probe.gradient_norm(batch, CrossEntropy())
        probe.same_norm(probe.gradient_norm(batch, CrossEntropy()), norm, "the next gradient norm")
        with refuses(ConflictError, "optim_step"):
            probe.rl.training.optim_step(AdamW(lr=0.0)).result()

    def test_zero_grad_discards_the_gradient(self, probe: Probe) -> None:
        """After zero_grad nothing of the earlier gradient is left, and a step is refused."""
        probe.needs("forward_backward", "optim_step", "zero_grad", loss="CrossEntropy")
        batch = probe.batch()
        norm = probe.gradient_norm(batch, CrossEntropy())
        probe.rl.training.forward_backward(batch, CrossEntropy()).result()
        probe.rl.training.zero_grad().result()
        with refuses(ConflictError, "optim_step"):
            probe.rl.training.optim_step(AdamW(lr=0.0)).result()
        probe.same_norm(probe.gradient_norm(batch, CrossEntropy()), norm, "gradient norm after it")

    def test_a_forward_backward_does_not_move_the_weights(self, probe: Probe) -> None:
        """Weights and version stay until the step."""
        probe.needs_training()
        batch = probe.batch()
        before = probe.rl.training.forward(batch).result()
        result = probe.rl.training.forward_backward(batch, CrossEntropy()).result()
        after = probe.rl.training.forward(batch).result()
        assert before.version == result.version == after.version
        probe.same(after.logprobs.values, before.logprobs.values, "logprobs before the step")

    def test_cotangents_are_the_loss_they_derive_from(self, probe: Probe) -> None:
        """The derivatives of a named loss, sent as Cotangents, give its gradient."""
        probe.needs_training()
        probe.needs("zero_grad", loss="Cotangents")
        probe.needs(loss="Reinforce")
        batch = probe.batch().replace(advantages=_varied(probe.batch()))
        loss = losses.Reinforce()
        wanted = probe.gradient_norm(batch, loss)
        outputs = probe.rl.training.forward(batch).result()
        norm = probe.gradient_norm(batch, cotangents_of(batch, loss, outputs))
        probe.same_norm(norm, wanted, "gradient norm of the cotangents")

    def test_cotangents_of_other_weights_are_refused(self, probe: Probe) -> None:
        """Cotangents that were taken at another version of the weights are a ConflictError."""
        probe.needs_training()
        probe.needs(loss="Cotangents")
        batch = probe.batch()
        outputs = probe.rl.training.forward(batch).result()
        late = cotangents_of(batch, CrossEntropy(), outputs)
        probe.train(batch)
        with refuses(ConflictError, str(outputs.version)):
            probe.rl.training.forward_backward(batch, late).result()
        probe.rl.training.zero_grad().result()

    def test_a_custom_loss_is_the_named_one_it_computes(self, probe: Probe) -> None:
        """A loss that runs in the client's process gives value and gradient of the named one."""
        probe.needs_training()
        probe.needs(loss="Cotangents")
        batch, count = probe.batch(), len(probe.batch().responses.values)

        def mean(batch: Batch, outputs: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
            slopes = np.full(count, -1 / count, np.float32)
            return float(-outputs["logprobs"].mean()), {"logprobs": slopes}

        value, norm = probe.measured(batch, CrossEntropy())
        own = losses.custom(mean, framework=None)
        result = probe.rl.training.forward_backward(batch, own).result()
        probe.same(result.value, value, "value of the custom loss")
        probe.same_norm(probe.applied_norm(), norm, "gradient norm of the custom loss")

    def test_a_failed_gradient_is_dirty_until_zero_grad(self, probe: Probe) -> None:
        """After a failed forward_backward, what would use the gradient fails with that failure as
        its cause, until zero_grad."""
        probe.needs("forward_backward", "optim_step", "zero_grad", loss="CrossEntropy")
        training, batch = probe.rl.training, probe.batch()
        training.forward_backward(batch, CrossEntropy()).result()
        with refuses(BackendError, "on purpose"):
            probe.wire.unchecked("abandon", Abandon(reason="on purpose")).result()
        attempts: dict[str, Any] = {
            "forward_backward": lambda: training.forward_backward(batch, CrossEntropy()),
            "optim_step": lambda: training.optim_step(AdamW(lr=0.0)),
            "sync": probe.rl.weights.sync,
            "save": lambda: training.save(probe.name("dirty")),
        }
        for name, attempt in attempts.items():
            if not probe.offers("operation", name):
                continue
            with pytest.raises(DirtyGradientsError) as caught:
                attempt().result()
            cause = str(caught.value.__cause__)
            assert "on purpose" in cause, f"{name}: its cause is {cause}"
        training.zero_grad().result()
        clean = probe.gradient_norm(batch, CrossEntropy())
        again = probe.gradient_norm(batch, CrossEntropy())
        probe.same_norm(clean, again, "gradient norm after zero_grad")


def _varied(batch: Batch) -> Any:
    slopes = np.linspace(-1, 1, len(batch.responses.values), dtype=np.float32)
    return batch.responses.with_values(slopes)
