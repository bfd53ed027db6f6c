"""Deliveries that go wrong: what is refused before anything moved, NaN, failures half-way and
their repair. Tiny models with a tied and an untied head in a real vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from sampler_engine import PATIENCE, PROMPT, Running, logprobs

from backends.arctic.sampling import transfer
from backends.arctic.weights.manifest import Form, lay_out
from backends.arctic.weights.segment import Segment, new_name, unlink
from remote_rl.errors import BackendError, InvalidRequestError

LONG = tuple(range(3, 203))  # more than a block of the cache


# -- refusals, before anything moved ------------------------------------------------------------


def _without(forms: dict[str, Form]) -> dict[str, Form]:
    del forms["model.norm.weight"]
    return forms


_BROKEN: dict[str, tuple[Callable[[dict[str, Form]], dict[str, Form]], str]] = {
    "missing": (_without, "'model.norm.weight' of the model is missing"),
    "extra": (
        lambda forms: {**forms, "model.extra": ((2,), "float32")},
        "no tensor 'model.extra'",
    ),
    "renamed": (
        lambda forms: {"norm.weight": forms.pop("model.norm.weight"), **forms},
        "'norm.weight' is called 'model.norm.weight'",
    ),
    "misshaped": (
        lambda forms: {**forms, "model.norm.weight": ((3,), "float32")},
        r"'model.norm.weight' has shape \[3\]",
    ),
    "of another dtype": (
        lambda forms: {**forms, "model.norm.weight": (forms["model.norm.weight"][0], "int32")},
        "'model.norm.weight' has dtype int32",
    ),
    "empty": (lambda forms: {}, "is missing"),
}


@pytest.mark.parametrize("fault", _BROKEN)
def test_a_manifest_that_is_not_the_models_is_refused(running: Running, fault: str) -> None:
    change, message = _BROKEN[fault]
    manifest = lay_out(change(running.engine.manifest()))
    name = new_name()
    Segment.create(name, manifest.extent)
    future = running.held(max_tokens=60)
    try:
        with pytest.raises(InvalidRequestError, match=message):
            running.run(running.engine.update(manifest, name, "abort", 99))
    finally:
        unlink(name)
    assert not future.done(), "what ran was touched"
    running.run(running.engine.resume())
    assert all(sample.finish_reason != "abort" for sample in future.result(PATIENCE))
    running.serves(running.model, running.version)


def test_a_segment_that_is_gone_or_too_small_is_refused(running: Running) -> None:
    manifest, name = lay_out(running.engine.manifest()), new_name()
    with pytest.raises(BackendError, match="is gone"):
        running.run(running.engine.update(manifest, name, "abort", 99))
    Segment.create(name, manifest.extent - 1)
    try:
        with pytest.raises(BackendError, match="and its manifest speaks of"):
            running.run(running.engine.update(manifest, name, "abort", 99))
    finally:
        unlink(name)
    running.serves(running.model, running.version)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_not_finite_is_refused_by_name(running: Running, value: float, dtype: str) -> None:
    other = running.other_model(5)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[3, 7] = value
    forms: dict[str, Form] = {
        name: (shape, dtype) for name, (shape, _) in running.engine.manifest().items()
    }
    version = running.version
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(InvalidRequestError, match=f"'{name}' holds NaN or infinity") as caught:
        running.deliver(other, forms=forms)
    assert caught.value.details["field"] == name
    running.serves(running.model, version)


def test_logits_of_nan_fail_their_generates_and_spoil_no_later_ones(running: Running) -> None:
    other = running.other_model(5)
    with torch.no_grad():
        other.model.layers[0].mlp.down_proj.weight.fill_(3e38)  # finite, its products are not
    running.deliver(other)
    for temperature in (1.0, 0.0):
        with pytest.raises(BackendError, match="are NaN after 0 tokens"):
            running.draw(LONG, count=24, temperature=temperature)
    running.serves(running.model, running.deliver(running.model))
    for sample in running.draw(count=60, max_tokens=4):  # so that all of the cache is used
        np.testing.assert_allclose(
            sample.logprobs, logprobs(running.model, PROMPT, sample), atol=1e-4
        )


# -- failures half-way --------------------------------------------------------------------------


def _breaks_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = transfer.WeightEngine._asked

    def broken(self: Any, tensors: Any) -> Iterator[Any]:
        for number, item in enumerate(whole(self, tensors)):
            if number == count:
                raise OSError("the trainer died")
            yield item

    monkeypatch.setattr(transfer.WeightEngine, "_asked", broken)


def _breaks_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(transfer.WeightEngine, "finish_weight_update", broken)


def _breaks_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(transfer.WeightEngine, "start_weight_update", broken)


@pytest.mark.parametrize("place", [0, 1, 4, 11, 19, "start", "end"])
def test_a_failure_half_way_serves_nothing_until_the_next_update(
    running: Running, place: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = running.other_model(5)
    future = running.held()
    with monkeypatch.context() as patch:
        if place == "end":
            _breaks_at_the_end(patch)
        elif place == "start":
            _breaks_at_the_start(patch)
        else:
            _breaks_after(int(place), patch)
        with pytest.raises(BackendError, match=r"failed half-way .*sync again") as caught:
            running.deliver(other)
    assert "Error: " in caught.value.details["traceback"]
    assert running.run(running.serving()) == (None, None)
    for generate in (future, running.begin()):
        with pytest.raises(BackendError, match="sync again"):
            generate.result(PATIENCE)
    assert running.engine.in_flight == 0
    running.run(running.engine.resume())
    with pytest.raises(BackendError, match="sync again"):
        running.draw()
    for model in (other, running.model):
        version = running.deliver(model)
        running.serves(model, version)


def test_a_failure_is_repaired_by_an_update_of_any_kind(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = running.other_model(5)
    for in_flight in ("wait", "abort"):
        with monkeypatch.context() as patch:
            _breaks_after(3, patch)
            for _ in range(2):
                with pytest.raises(BackendError, match="half-way"):
                    running.deliver(other)
        running.serves(other, running.deliver(other, in_flight))  # type: ignore[arg-type]
