"""Manifests: where tensors lie, exact comparison by name, fingerprints."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.arctic.weights.manifest import (
    ALIGNMENT,
    Entry,
    Form,
    Manifest,
    cast,
    check,
    fingerprint,
    lay_out,
)
from remote_rl.errors import InvalidRequestError

MODEL: dict[str, Form] = {
    "model.embed_tokens.weight": ((300, 64), "float32"),
    "model.layers.0.mlp.up_proj.weight": ((96, 64), "float32"),
    "model.layers.0.input_layernorm.weight": ((64,), "float32"),
    "model.norm.weight": ((64,), "bfloat16"),
}


def test_tensors_lie_one_after_the_other() -> None:
    manifest = lay_out(MODEL)
    assert [entry.name for entry in manifest] == list(MODEL)
    assert manifest.forms == MODEL
    assert manifest.nbytes == 4 * (300 * 64 + 96 * 64 + 64) + 2 * 64
    end = manifest.entries[-1]
    assert manifest.extent == end.offset + end.nbytes


shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
forms = st.dictionaries(
    st.text("abc.", min_size=1),
    st.tuples(shapes, st.sampled_from(["float32", "bfloat16", "int8", "float64"])),
)


@settings(deadline=None)
@given(forms)
def test_no_two_tensors_overlap(given_forms: dict[str, Form]) -> None:
    manifest = lay_out(given_forms)
    assert manifest.forms == given_forms
    assert all(entry.offset % ALIGNMENT == 0 for entry in manifest)
    for one, other in itertools.pairwise(manifest):
        assert one.offset + one.nbytes <= other.offset
    assert all(entry.offset + entry.nbytes <= manifest.extent for entry in manifest)


def test_a_name_comes_once() -> None:
    with pytest.raises(InvalidRequestError, match="'a' twice"):
        Manifest([Entry("a", (1,), "float32"), Entry("a", (1,), "float32", 64)])


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="float31"):
        Entry("a", (1,), "float31")


def test_equal_manifests_pass() -> None:
    check(dict(reversed(MODEL.items())), MODEL)
    check({}, {})


def _without(name: str) -> dict[str, Form]:
    return {each: form for each, form in MODEL.items() if each != name}


@pytest.mark.parametrize(
    ("changed", "messages", "field"),
    [
        (_without("model.norm.weight"), ["'model.norm.weight' of the model is missing"], None),
        (
            {**MODEL, "model.nrm.weight": ((64,), "float32")},
            ["has no tensor 'model.nrm.weight'", "did you mean 'model.norm.weight'"],
            "model.nrm.weight",
        ),
        (
            {**_without("model.norm.weight"), "norm.weight": MODEL["model.norm.weight"]},
            ["'norm.weight' is called 'model.norm.weight' in the model"],
            "norm.weight",
        ),
        (
            {**MODEL, "model.norm.weight": ((65,), "bfloat16")},
            ["'model.norm.weight' has shape [65], that of the model [64]"],
            "model.norm.weight",
        ),
        (
            {**MODEL, "model.norm.weight": ((64,), "float32")},
            ["'model.norm.weight' has dtype float32, that of the model bfloat16"],
            "model.norm.weight",
        ),
        (
            {**_without("model.norm.weight"), "other": ((1,), "int8")},
            ["no tensor 'other'", "'model.norm.weight' of the model is missing"],
            "other",
        ),
        ({}, [f"tensor {name!r} of the model is missing" for name in MODEL], None),
    ],
    ids=["missing", "extra", "renamed", "misshaped", "of another dtype", "swapped", "empty"],
)
def test_what_differs_is_named(
    changed: dict[str, Form], messages: list[str], field: str | None
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check(changed, MODEL)
    for message in messages:
        assert message in str(caught.value)
    assert caught.value.details["field"] in ({field} if field else set(MODEL))


def test_a_long_list_is_cut_and_counted() -> None:
    many = {f"layer.{number}": ((1,), "float32") for number in range(12)}
    with pytest.raises(InvalidRequestError, match="and 7 more missing ones"):
        check({}, many)


@settings(deadline=None)
@given(forms, forms)
def test_only_equal_forms_pass(one: dict[str, Form], other: dict[str, Form]) -> None:
    if one == other:
        check(one, other)
    else:
        with pytest.raises(InvalidRequestError):
            check(one, other)


def test_floats_are_cast_to_what_is_served_and_nothing_else_is() -> None:
    served: dict[str, Form] = {"a": ((1,), "bfloat16"), "b": ((1,), "int64")}
    sent: dict[str, Form] = {"a": ((1,), "float32"), "b": ((1,), "float32"), "c": ((2,), "float16")}
    assert cast(sent, served) == {
        "a": ((1,), "bfloat16"),
        "b": ((1,), "float32"),
        "c": ((2,), "float16"),
    }


def test_a_fingerprint_is_of_names_shapes_and_dtypes() -> None:
    known = lay_out(MODEL).fingerprint
    assert known == fingerprint(dict(reversed(MODEL.items())))
    name = "model.norm.weight"
    others: list[dict[str, Form]] = [
        _without(name),
        {**MODEL, name: ((64, 1), "bfloat16")},
        {**MODEL, name: ((64,), "float16")},
        {**_without(name), "model.norm.bias": MODEL[name]},
    ]
    assert len({known, *(fingerprint(other) for other in others)}) == 5
