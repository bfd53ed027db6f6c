"""New weights in a sampling engine: delivery and the versions of each token. Tiny models with a
tied and an untied head in a real vLLM."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
import torch
from sampler_engine import PATIENCE, PROMPT, Running, logprobs

from backends.arctic.weights.manifest import Form
from remote_rl.types import Sample

LONG = tuple(range(3, 203))  # more than a block of the cache


def _check_versions(
    samples: list[Sample],
    old: tuple[int, Any],
    new: tuple[int, Any],
    rest: str = "new",
    prompt: tuple[int, ...] = PROMPT,
) -> int:
    """Asserts for each token that it came from the model of its version; how many samples have
    both. old, new: version and model. rest: "new" where all tokens of the new version come from
    the new weights alone."""
    mixed = 0
    for sample in samples:
        assert sample.logprobs is not None
        error = {
            version: np.abs(sample.logprobs - logprobs(model, prompt, sample))
            for version, model in (old, new)
        }
        before = int(np.argmin(np.append(error[old[0]] < 1e-4, False)))
        if rest == "new":
            np.testing.assert_allclose(error[new[0]][before:], 0, atol=1e-4)
        first = old[0] if before else new[0]
        last = new[0] if before < len(sample) else old[0]
        assert (sample.first_version, sample.last_version) == (first, last)
        mixed += first != last
    return mixed


def test_an_engine_says_what_it_expects(running: Running) -> None:
    expected = {
        name: (tuple(parameter.shape), "float32")
        for name, parameter in running.model.named_parameters()
    }
    assert running.engine.manifest() == expected
    tied = running.model.config.tie_word_embeddings
    assert ("lm_head.weight" in expected) == (not tied)


def test_new_weights_are_what_is_drawn_from(running: Running) -> None:
    for seed, label in ((5, "first"), (6, 7), (5, None)):
        other = running.other_model(seed)
        version = running.deliver(other, label=label)
        running.serves(other, version, label)


def test_tensors_of_another_float_are_cast(running: Running) -> None:
    other = running.other_model(5)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(parameter.bfloat16())
    forms: dict[str, Form] = {
        name: (shape, "bfloat16") for name, (shape, _) in running.engine.manifest().items()
    }
    version = running.deliver(other, forms=dict(reversed(forms.items())))
    running.serves(other, version)


def test_a_prompt_that_was_cached_is_computed_anew(running: Running) -> None:
    for model in (running.model, running.other_model(5)):
        running.deliver(model)
        for _ in range(2):
            [sample] = running.draw(LONG, temperature=0.0)
            np.testing.assert_allclose(sample.logprobs, logprobs(model, LONG, sample), atol=1e-4)


def test_keep_goes_on_with_the_new_weights(running: Running) -> None:
    old = running.version
    future = running.held()
    other = running.other_model(5)
    new = running.deliver(other, "keep", label="kept")
    assert not future.done()
    running.run(running.engine.resume())
    samples = future.result(PATIENCE)
    assert _check_versions(samples, (old, running.model), (new, other))
    assert {sample.finish_reason for sample in samples} <= {"stop", "length"}
    assert {sample.label for sample in samples if sample.last_version == new} == {"kept"}
    assert {sample.first_label for sample in samples} == {None}


def test_several_updates_in_the_life_of_a_sample(running: Running) -> None:
    versions = [running.version]
    future = running.held(count=6, max_tokens=300)
    for seed in (5, 6):
        versions.append(running.deliver(running.other_model(seed)))
        drawn = running.engine.pulse()
        running.run(running.engine.resume())
        running.until(lambda: running.engine.pulse() >= drawn + 6 or future.done())  # noqa: B023
        running.run(running.engine.pause())
    running.run(running.engine.resume())
    for sample in future.result(PATIENCE):
        assert sample.first_version == versions[0]
        assert sample.last_version in versions


def test_the_old_cache_can_be_kept(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = running.engine
    monkeypatch.setattr(
        engine, "_settings", attrs.evolve(running.settings, recompute_in_flight=False)
    )
    old = running.version
    future = running.held(prompt=LONG, max_tokens=60)
    other = running.other_model(5)
    new = running.deliver(other, "keep")
    meanwhile = running.begin(LONG)  # whose old KV is still there
    running.run(engine.resume())
    samples = future.result(PATIENCE)
    assert _check_versions(samples, (old, running.model), (new, other), "mixed", LONG)
    [sample] = meanwhile.result(PATIENCE)
    assert sample.first_version == new
    np.testing.assert_allclose(sample.logprobs, logprobs(other, LONG, sample), atol=1e-4)


@pytest.mark.parametrize("in_flight", ["wait", "abort"])
def test_wait_and_abort_end_what_runs_with_the_old_weights(
    running: Running, in_flight: Any
) -> None:
    old, other = running.version, running.other_model(5)
    future = running.held()
    core = running.engine._core
    new = old + 1
    weights = dict(other.named_parameters())
    update = running.submit(running.deliver_by(weights, in_flight, new, "label"))
    if in_flight == "wait":
        running.until(lambda: core.closed_to_new)
        newcomers = running.begin(name="newcomers", count=2)
        running.until(lambda: len(core.waiting) == 2)
        assert not update.done()
        running.run(running.engine.resume())
        update.result(PATIENCE)
        for sample in newcomers.result(PATIENCE):
            assert (sample.first_version, sample.first_label) == (new, "label")
    else:
        update.result(PATIENCE)
    running.version = new
    samples = future.result(PATIENCE)
    assert _check_versions(samples, (old, running.model), (new, other)) == 0
    assert {sample.last_version for sample in samples} == {old}
    aborted = {sample.finish_reason for sample in samples if len(sample) < 200}
    assert ("abort" in aborted) == (in_flight == "abort")
    running.run(running.engine.resume())
    running.serves(other, new, "label")


def test_a_waiting_update_can_be_given_up(running: Running) -> None:
    future = running.held()
    weights = dict(running.other_model(5).named_parameters())
    update = running.submit(running.deliver_by(weights, "wait", running.version + 1, None))
    running.until(lambda: running.engine._core.closed_to_new)
    newcomers = running.begin()
    running.until(lambda: bool(running.engine._core.waiting))
    update.cancel()
    running.until(lambda: not running.engine._core.closed_to_new)
    running.run(running.engine.resume())
    for sample in (*future.result(PATIENCE), *newcomers.result(PATIENCE)):
        assert sample.last_version == running.version
    running.serves(running.model, running.version)
