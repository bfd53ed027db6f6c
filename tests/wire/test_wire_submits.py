"""Submits take shorter ways into and out of a frame; they end where the general ways do."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_rl.errors import RemoteRLError
from remote_rl.messages import PendingDigest, Submit
from remote_rl.requests import Push, Save, ZeroGrad
from remote_rl.submits import submit_of
from remote_rl.wire import decode, encode, seal

GOOD: dict[str, Any] = {
    "client_id": "c" * 32,
    "instance_id": "i" * 32,
    "acknowledged": (("training", 1),),
    "operation": "zero_grad",
    "number": 2,
    "request": ZeroGrad(),
    "digest": "d" * 32,
    "generates_before": 0,
    "deadline": None,
    "linger": 0.05,
    "patience": 0.0,
}
#: of every field: good ones, some of which the constructor converts, and bad ones
CANDIDATES: dict[str, tuple[Any, ...]] = {
    "client_id": ("a", "", None, 3, np.str_("a")),
    "instance_id": ("ä\n", "", None, b"i"),
    "acknowledged": ((), (("training", 1), ("query", 7)), (["training", 1],), [("training", 1)]),
    "operation": ("save", "", 1),
    "number": (1, 2**53, 2**53 + 1, 0, True, 1.0, np.int64(3), None),
    "request": (ZeroGrad(), Save(name="one", metadata={"step": 1}), None, "zero_grad"),
    "digest": ("d", "", None, PendingDigest(), 5, np.zeros(16, np.uint8)),
    "generates_before": (0, 12, -1, False, 1.5),
    "deadline": (None, 1.0, 3, 0.0, -1.0, float("inf"), float("nan"), True, "1"),
    "linger": (0.0, 60.0, 60.5, -0.5, 1, float("nan"), None),
    "patience": (0.0, 2.0, 61.0, float("inf"), True),
    "unknown": (1,),
}


def made(build: Any, values: dict[str, Any]) -> Any:
    """The object, or class and sentence of what it is refused with."""
    try:
        submit = build(values)
    except (RemoteRLError, TypeError, ValueError) as error:
        return type(error), str(error)
    plain = attrs.asdict(submit, recurse=False)
    return {name: (type(value), value) for name, value in plain.items()}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, good in CANDIDATES.items() for value in good]
)
def test_one_value_is_taken_or_refused_as_by_the_constructor(name: str, value: Any) -> None:
    values = {**GOOD, name: value}
    assert repr(made(submit_of, values)) == repr(made(lambda these: Submit(**these), values))


@pytest.mark.parametrize("name", sorted(GOOD))
def test_a_field_that_is_left_out_has_its_default_or_is_asked_for(name: str) -> None:
    values = {key: value for key, value in GOOD.items() if key != name}
    assert made(submit_of, values) == made(lambda these: Submit(**these), values)


def test_what_is_right_at_sight_is_no_other_object_than_the_constructor_makes() -> None:
    submit = submit_of(GOOD)
    assert submit == Submit(**GOOD)
    assert hash(submit) == hash(Submit(**GOOD))
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        submit.number = 3  # type: ignore[misc]


REQUESTS = (
    ("zero_grad", ZeroGrad()),
    ("save", Save(name="one", metadata={"text": 'ä"\\', "numbers": [1, 0.5, None]})),
    ("push", Push(tensors={"w": np.ones((2, 2), np.float32)})),
)


@given(
    which=st.sampled_from(REQUESTS),
    client_id=st.text(min_size=1, max_size=8),
    acknowledged=st.lists(st.tuples(st.text(max_size=4), st.integers(0, 2**53)), max_size=3),
    number=st.integers(1, 2**53),
    before=st.integers(0, 2**53),
    deadline=st.none() | st.floats(1e-9, 1e9),
    linger=st.floats(0, 60),
    patience=st.floats(0, 60),
)
def test_a_submit_is_written_as_every_other_message(
    which: tuple[str, Any],
    client_id: str,
    acknowledged: list[tuple[str, int]],
    number: int,
    before: int,
    deadline: float | None,
    linger: float,
    patience: float,
) -> None:
    operation, request = which
    sealed = seal(request)
    submit = Submit(
        client_id=client_id,
        instance_id=client_id[::-1],
        acknowledged=acknowledged,
        operation=operation,
        number=number,
        request=request,
        digest=sealed,
        generates_before=before,
        deadline=deadline,
        linger=linger,
        patience=patience,
    )
    told = attrs.evolve(submit, digest=sealed.text())
    written = b"".join(encode(submit).parts)
    assert written == b"".join(encode(told).parts)
    back = decode(written)
    for field in attrs.fields(Submit):
        if field.name != "request":
            assert getattr(back, field.name) == getattr(told, field.name)
