"""Whatever arrives is an object of the contract or an error by its name, at a bounded cost."""

from __future__ import annotations

import tracemalloc
from typing import Any

import attrs
import pytest
from frame_mutations import (
    BODIES,
    FRAMES,
    assemble,
    changed_arrays,
    changed_bytes,
    changed_json,
    made_up,
    split,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remote_rl.errors import InvalidRequestError, ProtocolError
from remote_rl.messages import MESSAGES, Message, Outcome, Submit, Waited
from remote_rl.ops import OPERATIONS
from remote_rl.requests import Save
from remote_rl.wire import decode, encode, seal
from remote_rl.wire.vocabulary import wire_classes

#: of what a frame takes while it is decoded, by its own length and beside it
MULTIPLE, BESIDE = 64, 1 << 20
more = settings(max_examples=max(300, settings.default.max_examples))  # type: ignore[union-attr]


def decoded(body: bytes) -> Any:
    """The object, or None where it was refused by name; anything else is raised."""
    try:
        return decode(body)
    except (ProtocolError, InvalidRequestError) as error:
        encode(error)  # the answer that says so
        return None


def test_frames_that_nobody_changed_are_taken() -> None:
    for body in BODIES:
        header, payload = split(body)
        assert assemble(body[8 : 8 + int.from_bytes(body[4:8], "little")], payload) == body
        assert decoded(body) is not None
        assert header["tree"]


@more
@given(changed_bytes())
def test_changed_bytes_are_an_object_or_an_error_by_name(body: bytes) -> None:
    decoded(body)


@more
@given(changed_json())
def test_a_changed_tree_is_an_object_or_an_error_by_name(body: bytes) -> None:
    decoded(body)


@more
@given(changed_arrays())
def test_changed_arrays_are_an_object_or_an_error_by_name(body: bytes) -> None:
    decoded(body)


@more
@given(made_up())
def test_a_frame_that_was_made_up_is_an_object_or_an_error_by_name(body: bytes) -> None:
    decoded(body)


@given(FRAMES)
def test_what_is_taken_can_be_said_again(body: bytes) -> None:
    value = decoded(body)
    if value is not None:
        again = b"".join(encode(value).parts)
        assert type(decoded(again)) is type(value)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(FRAMES)
def test_a_frame_costs_a_small_multiple_of_its_own_size(body: bytes) -> None:
    decoded(body)  # what is imported and remembered once
    tracemalloc.start()
    try:
        decoded(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MULTIPLE * len(body) + BESIDE


@pytest.mark.parametrize(
    "text",
    [
        "[" + "[]," * 30_000 + "[]]",
        "[" + "1.5," * 30_000 + "1]",
        "[" + '"ab",' * 15_000 + "1]",
        "[" + "{}," * 30_000 + "{}]",
        '{"@": "map", "of": {' + ",".join(f'"{n}": 1' for n in range(20_000)) + "}}",
        '{"@": "Save", "name": "a", "metadata": {"@": "map", "of": {"a": ['
        + "[0]," * 15_000
        + "0]}}}",
        '{"@": "Wait", "client_id": "c", "instance_id": "i", "timeout": 1, "acknowledged": ['
        + '["training", 1],' * 10_000
        + '["training", 1]]}',
    ],
    ids=["lists", "floats", "texts", "objects", "map", "metadata", "keys"],
)
def test_the_densest_trees_cost_a_small_multiple_of_their_text(text: str) -> None:
    body = assemble(f'{{"tree": {text}, "arrays": []}}'.encode(), b"")
    tracemalloc.start()
    try:
        decoded(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MULTIPLE * len(body), peak / len(body)


@given(st.integers(1, 5000), st.sampled_from(["[", '{"a":', '[{"@": "map", "of": {"a": ']))
def test_depth_is_an_error_and_no_crash(depth: int, opening: str) -> None:
    closing = {"[": "]", '{"a":': "}", '[{"@": "map", "of": {"a": ': "}}]"}[opening]
    text = opening * depth + "1" + closing * depth
    decoded(assemble(f'{{"tree": {text}, "arrays": []}}'.encode(), b""))
    nested = f'{{"@": "Save", "name": "a", "metadata": {{"@": "map", "of": {{"a": {text}}}}}}}'
    value = decoded(assemble(f'{{"tree": {nested}, "arrays": []}}'.encode(), b""))
    if value is not None:
        encode(value)


@pytest.mark.parametrize("levels", [1, 2])
@given(depth=st.integers(1, 400))
def test_what_is_too_deep_is_refused_before_it_is_sent(levels: int, depth: int) -> None:
    """And whatever is sent is taken, is said again by the answer, and is taken there."""
    nested: Any = 1
    for _ in range(depth):
        nested = [nested] if levels == 1 else {"a": nested}
    if levels * depth > 109:  # Save, its metadata, and what carries and answers it take the rest
        with pytest.raises(InvalidRequestError, match="flatten them"):
            _submit({"a": nested})
        return
    submit = decode(b"".join(encode(_submit({"a": nested})).parts))
    told = Outcome(stream="training", number=1, done=True, result=submit.request)
    answer = Waited(outcomes=(told,))
    assert decode(b"".join(encode(answer).parts)) == answer


def _submit(metadata: dict[str, Any]) -> Submit:
    request = Save(name="a", metadata=metadata)
    return Submit(
        client_id="c",
        instance_id="i",
        operation="save",
        number=1,
        request=request,
        digest=seal(request),
    )


SENT_BY_CLIENTS = [
    *(each for each in MESSAGES if issubclass(each, Message)),
    *(operation.request for operation in OPERATIONS.values()),
]


@pytest.mark.parametrize("name", sorted({each.__name__ for each in SENT_BY_CLIENTS}))
def test_every_field_that_a_client_sends_is_checked_as_it_arrives(name: str) -> None:
    fields = attrs.fields(wire_classes()[name])
    unchecked = {field.name for field in fields if field.validator is None}
    # whose converters refuse whatever is none, and one that the dispatcher looks at key by key
    assert unchecked <= {"prompts", "tensors", "acknowledged"}
