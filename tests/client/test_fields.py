"""Every field that travels is proven: a semantic one by a differing result, a scheduling one by the
mock's call log, a reserved one by its refusal, a local one by not travelling. Nothing is accepted
and ignored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import test_fields_losses
import test_fields_sampling
import test_fields_training
from client_fields import fields_of_kind, request_classes, travelling_classes, unclassified_fields
from client_support import SessionFactory, small_mock

from remote_rl import AdamW, Batch, SamplingParams, Session, losses
from remote_rl.errors import InvalidRequestError, UnknownNameError
from remote_rl.messages import Message, Submit
from remote_rl.types import TensorForm
from remote_rl.wire import decode, encode

BATCH = test_fields_training.BATCH
PROOFS = {
    **test_fields_losses.PROOFS,
    **test_fields_sampling.PROOFS,
    **test_fields_training.PROOFS,
}
CLASSES = {each.__name__: each for each in travelling_classes()}


def test_every_field_says_what_it_is() -> None:
    assert unclassified_fields() == []
    assert {"SamplingParams", "AdamW", "Batch", "Tensor", "KL", "PPO", "Aggregation"} <= set(
        CLASSES
    )


def test_every_semantic_field_has_its_proof() -> None:
    assert sorted(PROOFS) == fields_of_kind("semantic")


# -- scheduling: in the call log ------------------------------------------------------------------

SCHEDULING: dict[str, tuple[str, Any, Callable[[Session, Any], Any]]] = {
    **{
        f"SamplingParams.{field}": (
            "generate",
            value,
            lambda rl, value, field=field: rl.sampling.generate(
                [[1]], SamplingParams(max_tokens=1, **{field: value})
            ),
        )
        for field, value in (("session_id", "s-7"), ("priority", -3), ("cache_salt", "salt"))
    },
    "FinishSession.session_id": (
        "finish_session",
        "s-7",
        lambda rl, value: rl.sampling.finish_session(value),
    ),
    "Sleep.half": ("sleep", "sampling", lambda rl, value: rl.sleep(value)),
    "Wake.half": ("wake", "training", lambda rl, value: rl.wake(value)),
}


def test_every_scheduling_field_has_its_proof() -> None:
    assert sorted(SCHEDULING) == fields_of_kind("scheduling")


@pytest.mark.parametrize("field", SCHEDULING)
def test_a_scheduling_field_is_in_the_call_log(field: str, mocked: Session, mock: Any) -> None:
    operation, value, call = SCHEDULING[field]
    call(mocked, value).result()
    (logged,) = [
        each for each in mock.calls if each.operation == operation and each.event == "started"
    ]
    assert logged.scheduling[field.rpartition(".")[2]] == value


def test_scheduling_fields_change_no_sample(session_factory: SessionFactory) -> None:
    drawn = []
    for options in ({}, {"session_id": "a", "priority": 5, "cache_salt": "b"}):
        params = SamplingParams(n=3, max_tokens=8, seed=1, **options)
        groups = session_factory(small_mock()).sampling.generate([[1]], params).result()
        drawn.append([sample.tokens.tolist() for sample in groups[0]])
    assert drawn[0] == drawn[1]


# -- reserved: refused by name --------------------------------------------------------------------


def least(name: str) -> dict[str, Any]:
    """A valid value for each field of a class that has no default."""
    values: dict[str, Any] = {
        "batch": BATCH,
        "loss": losses.CrossEntropy(),
        "optimizer": AdamW(lr=0.1),
        "prompts": [[1]],
        "params": SamplingParams(max_tokens=1),
        "tensors": {"w": np.zeros(1, np.float32)},
        "source": "base",
        "name": "a",
        "session_id": "s",
        "reason": "r",
    }
    if name == "Push":
        return {"tensors": values["tensors"]}
    if name == "PushPart":
        form = TensorForm(shape=(1,), dtype="float32")
        return {"transfer": "t", "forms": {"w": form}}
    if name == "Batch":
        return {"prompts": [[1]], "prompt_index": [0], "responses": [[2]], "temperature": 1.0}
    required = [f.name for f in attrs.fields(CLASSES[name]) if f.default is attrs.NOTHING]
    return {field: values[field] for field in required}


@pytest.mark.parametrize("field", fields_of_kind("reserved"))
def test_a_reserved_field_is_refused_by_name(field: str) -> None:
    owner, _, name = field.partition(".")
    valid = CLASSES[owner](**least(owner))
    default = getattr(valid, name)
    assert CLASSES[owner](**least(owner), **{name: default}) is not None
    for value in ("critic", ["critic"], 1):
        with pytest.raises(InvalidRequestError, match=f"{owner}.{name}=.* is reserved") as caught:
            CLASSES[owner](**least(owner), **{name: value})
        assert caught.value.details["field"] == name


# -- local: never sent ----------------------------------------------------------------------------


def test_the_local_fields_are_these() -> None:
    assert fields_of_kind("local") == [
        "Batch.extras",
        "Batch.policy_version",
        "Batch.sampling_logprobs",
    ]


def test_a_local_field_is_not_sent(mocked: Session, messages: list[Message]) -> None:
    full = BATCH.replace(
        extras={"uid": np.array(["a", "b"])},
        policy_version=[1, 2],
        sampling_logprobs=[[-1.0, -1.0, -1.0], [-1.0]],
        advantages=[1.0, 2.0],
    )
    mocked.training.forward(full).result()
    mocked.training.forward_backward(full, losses.CrossEntropy()).result()
    sent = [each.request.batch for each in messages if isinstance(each, Submit)]  # type: ignore[attr-defined]
    assert len(sent) == 2
    for batch in sent:
        assert (batch.extras, batch.policy_version, batch.sampling_logprobs) == ({}, None, None)
        assert batch.advantages is None  # nor what this loss does not read
    across = decode(b"".join(bytes(part) for part in encode(full).parts))
    assert (across.extras, across.policy_version, across.sampling_logprobs) == ({}, None, None)


# -- unknown names --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_an_unknown_keyword_names_the_nearest(name: str) -> None:
    fields = [field.name for field in attrs.fields(CLASSES[name]) if field.init]
    if not fields:
        with pytest.raises(UnknownNameError, match=f"{name} has no field 'anything'"):
            CLASSES[name](anything=1)
        return
    misspelt = fields[0] + "x"
    with pytest.raises(UnknownNameError) as caught:
        CLASSES[name](**{misspelt: 1})
    assert str(caught.value) == f"{name} has no field {misspelt!r}; did you mean {fields[0]!r}?"
    assert isinstance(caught.value, AttributeError)
    assert isinstance(caught.value, ValueError)


def test_the_requests_are_all_there() -> None:
    assert set(request_classes()) <= set(CLASSES)
    assert isinstance(BATCH, Batch)
