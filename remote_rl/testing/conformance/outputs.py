"""Testing: what a forward returns (imports pytest, numpy, the contract, base, checks,
probe)."""

from __future__ import annotations

import numpy as np
import pytest

from ...losses import CrossEntropy
from ...types import AdamW, Batch
from .base import Conformance
from .checks import places, unrolled
from .probe import Probe


class Outputs(Conformance):
    """Logprobs and entropies of a forward: alignment, normalisation, batching."""

    @pytest.mark.parametrize("texts", ["short", "long"])
    def test_entry_t_of_a_forward_belongs_to_response_token_t(
        self, probe: Probe, texts: str
    ) -> None:
        """Entry t is the logprob of response token t given the prompt and the tokens before it:
        the same as where those are part of the prompt, in long texts as in short ones."""
        probe.needs("forward", output="logprobs")
        batch = probe.batch() if texts == "short" else probe.long_batch()
        count = len(batch.responses.values)
        chosen = list(range(count)) if texts == "short" else places(batch)
        alone = probe.logprobs(unrolled(batch).select(chosen))
        probe.same(probe.logprobs(batch)[chosen], alone, f"logprobs of a forward of {texts} texts")

    def test_the_first_token_is_given_the_prompt(self, probe: Probe) -> None:
        """The first response token is scored given its whole prompt, the last token included."""
        probe.needs("forward", output="logprobs")
        one, other, token = probe.ids(3)
        batch = Batch(
            prompts=[[one], [other]],
            prompt_index=[0, 1],
            responses=[[token], [token]],
            temperature=1.0,
        )
        if probe.offers("loss", "CrossEntropy"):  # a base may know nothing of its prompts yet
            probe.needs_training()
            probe.train(batch.select([0]))
        first, second = probe.logprobs(batch)
        probe.differ(first, second, "logprobs of one token after two prompts")

    def test_logprobs_are_those_of_the_full_vocabulary(self, probe: Probe) -> None:
        """The probabilities of all tokens after a prompt add up to one."""
        probe.needs("forward", output="logprobs")
        size = min(probe.model.vocab_size, 1024)
        logprobs = probe.logprobs(_all_tokens(probe, size))
        assert (logprobs <= probe.tolerance).all(), f"a logprob of {logprobs.max():g} is above 0"
        total = float(np.exp(logprobs).sum())
        if size == probe.model.vocab_size:
            probe.same(total, 1.0, "sum of all tokens' probabilities")
        else:
            assert total <= 1 + probe.tolerance, f"{size} tokens' probabilities sum to {total:g}"

    @pytest.mark.parametrize("temperature", [1.0, 0.5])
    def test_entropies_are_those_of_the_full_vocabulary(
        self, probe: Probe, temperature: float
    ) -> None:
        """Entropy, in nats, is that of the distribution that the token was given, at the row's
        temperature."""
        probe.needs("forward", output="entropy")
        size = min(probe.model.vocab_size, 1024)
        batch = _all_tokens(probe, size).replace(temperature=temperature)
        outputs = probe.rl.training.forward(batch, {"logprobs", "entropy"}).result()
        logprobs = outputs.logprobs.values.astype(np.float64)
        entropies = outputs.entropy.values.astype(np.float64)
        assert (entropies >= -probe.tolerance).all(), f"an entropy of {entropies.min():g}"
        if size == probe.model.vocab_size:
            wanted = np.full(size, -(np.exp(logprobs) * logprobs).sum())
            probe.same(entropies, wanted, "entropies after one prompt")
        else:
            limit = float(np.log(probe.model.vocab_size)) + probe.tolerance
            assert entropies.max() <= limit, f"an entropy of {entropies.max():g} is above log V"

    def test_outputs_do_not_depend_on_the_rest_of_the_batch(self, probe: Probe) -> None:
        """A row's outputs are the same alone, in another order, and with its prompt sent again."""
        probe.needs("forward", output="logprobs")
        batch = probe.batch()
        rows = probe.rl.training.forward(batch).result().logprobs
        for row in range(len(batch)):
            alone = probe.logprobs(batch.select([row]))
            probe.same(alone, rows[row], f"row {row} alone and in its batch")
        order = [3, 1, 0, 2]
        turned = probe.logprobs(batch.select(order))
        probe.same(turned, rows.select(order).values, "rows in another order")
        repeated = Batch.concat([batch.select([row]) for row in range(len(batch))])
        probe.same(probe.logprobs(repeated), rows.values, "prompts shared and repeated")

    def test_an_empty_response_is_legal_in_a_forward(self, probe: Probe) -> None:
        """A response without tokens has no outputs and changes no other row's."""
        probe.needs("forward", output="logprobs")
        batch = probe.batch()
        ids = [row.tolist() for row in batch.responses]
        with_empty = Batch(
            prompts=batch.prompts,
            prompt_index=[0, 0, 1, 1, 2],
            responses=[*ids[:2], [], *ids[2:]],
            temperature=1.0,
        )
        outputs = probe.rl.training.forward(with_empty).result().logprobs
        assert outputs.lengths.tolist() == [3, 2, 0, 4, 1]
        probe.same(outputs.values, probe.logprobs(batch), "the other rows")

    def test_a_forward_changes_nothing(self, probe: Probe) -> None:
        """A forward leaves weights, version and accumulated gradient alone, and says the version
        of the weights that it used."""
        probe.needs_training()
        batch = probe.batch()
        norm = probe.gradient_norm(batch, CrossEntropy())
        probe.rl.training.forward_backward(batch, CrossEntropy()).result()
        version = probe.rl.weights.version().result().trainer
        before = probe.rl.training.forward(batch).result()
        after = probe.rl.training.forward(batch).result()
        assert (before.version, after.version) == (version, version)
        probe.same(after.logprobs.values, before.logprobs.values, "two forwards")
        probe.same_norm(probe.applied_norm(), norm, "gradient norm with a forward in between")

    def test_operations_run_in_the_order_of_the_calls(self, probe: Probe) -> None:
        """Operations that are submitted without waiting run one after the other, as called."""
        probe.needs_training()
        training, batch = probe.rl.training, probe.batch()
        before = training.forward(batch)
        backward = training.forward_backward(batch, CrossEntropy())
        during = training.forward(batch)
        step = training.optim_step(AdamW(lr=probe.rate, weight_decay=0.0))
        after = training.forward(batch)
        version = probe.rl.weights.version()
        stepped = step.result()
        assert not stepped.skipped
        assert before.result().version == backward.result().version == during.result().version
        assert after.result().version == stepped.version == version.result().trainer
        first, last = before.result().logprobs.values, after.result().logprobs.values
        probe.same(during.result().logprobs.values, first, "a forward before the step")
        probe.differ(last, first, "a forward after the step and one before it")


def _all_tokens(probe: Probe, size: int) -> Batch:
    return Batch(
        prompts=[probe.prompts[1]],
        prompt_index=np.zeros(size, np.int32),
        responses=[[token] for token in range(size)],
        temperature=1.0,
    )
