"""A push that is too large for one message: how it is cut, that it is one operation, and what
becomes of it where something goes wrong on the way."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np
import pytest
from client_double import EVERYTHING, Double
from client_support import ServerFactory, SessionFactory, small_mock
from hypothesis import given
from hypothesis import strategies as st
from test_cancel_and_deadlines import Clock, clock, timed

from remote_rl import AdamW, Batch, Session, Tensor, connect, losses
from remote_rl.client import pushes
from remote_rl.client.pushes import AT_ONCE, PART_BYTES, cut
from remote_rl.errors import (
    BackendError,
    ConflictError,
    DeadlineExceededError,
    InvalidRequestError,
    OperationCancelled,
    UnsupportedError,
)
from remote_rl.messages import Message, Submit
from remote_rl.types import TensorForm
from remote_rl.types.results import TENSOR_DTYPES

__all__ = ["clock", "timed"]  # fixtures

LOSS = losses.CrossEntropy()
#: 40 bytes: five parts of 8, and their forms
WEIGHTS = {"w": np.arange(10, dtype=np.float32)}
FORMS, PIECES = ("push_part", "forms"), ("push_part", "pieces")
Tensors = Mapping[str, Any]


def own(mock: Any, factor: float = 2.0) -> dict[str, Any]:
    """Every tensor of the model, changed."""
    return {name: array * factor for name, array in mock.training.policy.weights.items()}


def served(mock: Any) -> dict[str, bytes]:
    """What the sampler holds, as bytes."""
    return {name: array.tobytes() for name, array in mock.sampling.served.weights.items()}


def submits(messages: list[Message]) -> list[str]:
    """What was submitted of weights, in order."""
    sent = [each.operation for each in messages if isinstance(each, Submit)]
    return [name for name in sent if name in ("push_part", "push")]


def until(rl: Session, reached: Callable[[], bool]) -> None:
    """Until it is so; each look is a message there and back."""
    for _ in range(2000):
        if reached():
            return
        rl.info().result()
    raise AssertionError


# -- how it is cut ------------------------------------------------------------------------------


@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=12),
    dtypes=st.lists(st.sampled_from(sorted(TENSOR_DTYPES)), min_size=12, max_size=12),
    part_bytes=st.integers(1, 200),
)
def test_every_byte_is_in_one_part_in_order(
    shapes: list[list[int]], dtypes: list[str], part_bytes: int
) -> None:
    forms = {
        f"t{number}": TensorForm(shape=tuple(shape), dtype=dtype)
        for number, (shape, dtype) in enumerate(zip(shapes, dtypes))
    }
    parts = cut(forms, part_bytes)
    came = dict.fromkeys(forms, 0)
    for part in parts:
        assert len({name for name, _, _ in part}) == len(part) > 0
        for name, start, stop in part:
            assert start == came[name] < stop
            assert stop % forms[name].itemsize == 0
            came[name] = stop
        size = sum(stop - start for _, start, stop in part)
        assert size <= part_bytes or (len(part) == 1 and size == forms[part[0][0]].itemsize)
    assert came == {name: form.nbytes for name, form in forms.items()}
    # no part has room for the element that begins the next one
    for part, after in itertools.pairwise(parts):
        size = sum(stop - start for _, start, stop in part)
        assert size + forms[after[0][0]].itemsize > part_bytes


def test_pieces_are_views_of_the_callers_memory() -> None:
    large, bits = np.arange(600, dtype=np.float32), np.arange(8, dtype=np.uint16)
    tensors = {"large": large, "bits": Tensor(data=bits, dtype="bfloat16")}
    plan = pushes.Plan(
        {name: Tensor.of(each) for name, each in tensors.items()},
        forms := {name: TensorForm.of(Tensor.of(each)) for name, each in tensors.items()},
        cut(forms, 1000),
    )
    together = {"large": b"", "bits": b""}
    for request in plan.requests("t", "policy"):
        for name, piece in request.pieces.items():
            assert np.shares_memory(piece.data, large if name == "large" else bits)
            assert piece.offset == len(together[name])
            together[name] += piece.data.tobytes()
    assert together == {"large": large.tobytes(), "bits": bits.tobytes()}


# -- one operation ------------------------------------------------------------------------------


@pytest.mark.parametrize("part_bytes", [1, 96, 1000, 1175])
def test_in_parts_or_not_the_bits_and_the_receipt_are_the_same(
    part_bytes: int, session_factory: SessionFactory, messages: list[Message]
) -> None:
    held, receipts = [], []
    for limit in (None, part_bytes):
        mock = small_mock()
        rl = session_factory(mock)
        rounded = {
            name: Tensor(data=array.astype(np.float16), dtype="float16")
            if name.startswith("lm")
            else array
            for name, array in own(mock).items()
        }
        receipts.append(rl.weights.push(rounded, label="mine", part_bytes=limit).result(60))
        held.append(served(mock))
    assert held[0] == held[1]
    assert attrs.evolve(receipts[0], seconds=0.0) == attrs.evolve(receipts[1], seconds=0.0)
    assert (receipts[1].version, receipts[1].label, receipts[1].tensors) == (1, "mine", 5)
    assert submits(messages)[0] == "push"  # the first one, whole
    assert set(submits(messages)[1:-1]) == {"push_part"}
    assert submits(messages)[-1] == "push"


@pytest.mark.parametrize(("part_bytes", "parts"), [(40, 0), (39, 2), (8, 5), (7, 10), (1, 10)])
def test_only_what_exceeds_the_limit_goes_in_parts(
    part_bytes: int, parts: int, rl: Session, double: Double
) -> None:
    rl.weights.push(WEIGHTS, part_bytes=part_bytes).result(60)
    assert double.log == [*([FORMS, *[PIECES] * parts] if parts else []), ("push", None)]


def test_the_limit_is_64_mib_where_nothing_is_said(
    rl: Session, double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert PART_BYTES == 64 << 20
    monkeypatch.setattr(pushes, "PART_BYTES", 39)
    rl.weights.push(WEIGHTS).result(60)
    assert double.log == [FORMS, PIECES, PIECES, ("push", None)]
    assert double.requests[-1].tensors is None


def test_few_parts_are_on_their_way_at_once(
    rl: Session, double: Double, messages: list[Message]
) -> None:
    hold = double.hold("push_part")
    push = rl.weights.push(WEIGHTS, part_bytes=4)
    assert hold.reached.wait(60)
    until(rl, lambda: len(submits(messages)) >= 1 + AT_ONCE)
    for _ in range(20):
        rl.info().result()
    assert submits(messages) == ["push_part"] * (1 + AT_ONCE)
    assert not push.done()
    hold.open()
    push.result(60)
    assert double.names().count("push_part") == 11
    assert push.progress is not None
    assert (push.progress.done, push.progress.total) == (40, 40)


def test_what_is_called_after_a_push_runs_after_it(
    rl: Session, double: Double, batch: Batch
) -> None:
    """And what was called before it, before: also losses of the caller's own, which share its
    thread."""

    def flat(batch: Batch, outputs: Any) -> Any:
        return 0.0, {"logprobs": np.zeros_like(outputs["logprobs"])}

    custom = losses.custom(flat, framework=None)
    hold = double.hold("push_part")
    operations: list[Any] = [rl.training.forward_backward(batch, custom)]
    operations.append(rl.weights.push(WEIGHTS, label="first", part_bytes=16))
    operations.append(rl.training.forward_backward(batch, custom))
    operations.append(rl.training.optim_step(AdamW(lr=0.5)))
    operations.append(rl.weights.push(WEIGHTS, label="second", part_bytes=39))
    operations.append(rl.training.zero_grad())
    assert hold.reached.wait(60)
    assert double.names() == ["forward", "forward_backward", "push_part", "push_part"]
    hold.open()
    for operation in operations:
        operation.result(60)
    training = [("forward", "current"), ("forward_backward", "cotangents")]
    assert double.log == [
        *training,
        *(FORMS, PIECES, PIECES, PIECES, ("push", "first")),
        *training,
        ("optim_step", 0.5),
        *(FORMS, PIECES, PIECES, ("push", "second")),
        ("zero_grad", None),
    ]


def test_a_close_waits_for_a_push(session_factory: SessionFactory) -> None:
    mock = small_mock()
    with session_factory(mock) as rl:
        rl.weights.push(tensors := own(mock), part_bytes=100)
    assert served(mock) == {name: array.tobytes() for name, array in tensors.items()}


# -- refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", ["missing", "unknown", "shape"])
def test_tensors_that_are_not_the_models_are_refused_before_any_is_sent(
    problem: str, mocked: Session, mock: Any, messages: list[Message]
) -> None:
    before, tensors = served(mock), own(mock)
    if problem == "missing":
        del tensors["lm_head.bias"]
        words = r"push lacks 'lm_head\.bias'"
    elif problem == "unknown":
        tensors["lm_head.biass"] = tensors["lm_head.bias"]
        words = r"no tensor 'lm_head\.biass'; did you mean 'lm_head\.bias'"
    else:
        tensors["lm_head.bias"] = np.zeros(5)
        words = r"'lm_head\.bias' has shape \[5\]; the model's has \[12\]"
    with pytest.raises(InvalidRequestError, match=words):
        mocked.weights.push(tensors, part_bytes=100).result(60)
    sent = [each.request for each in messages if isinstance(each, Submit)]
    assert [(bool(each.forms), bool(each.pieces)) for each in sent] == [(True, False)]
    assert served(mock) == before
    assert mocked.weights.version().result(60).sampler == 0
    assert mocked.weights.push(own(mock), part_bytes=100).result(60).version == 1


def test_what_is_found_at_the_end_is_refused_all_the_same(mocked: Session, mock: Any) -> None:
    before, tensors = served(mock), own(mock)
    tensors["lm_head.bias"][3] = np.nan
    with pytest.raises(InvalidRequestError, match=r"'lm_head\.bias' holds NaN"):
        mocked.weights.push(tensors, part_bytes=100).result(60)
    assert served(mock) == before


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "64M"])
def test_part_bytes_is_a_whole_number(wrong: Any, rl: Session, messages: list[Message]) -> None:
    with pytest.raises(InvalidRequestError, match="part_bytes must be a whole number of bytes"):
        rl.weights.push(WEIGHTS, part_bytes=wrong)
    assert messages == []


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"tensors": {"w": np.zeros(9)}}, UnsupportedError, "push dtype 'float64'"),
        ({"in_flight": "kep"}, InvalidRequestError, "did you mean 'keep'"),
        ({"label": 0.5}, InvalidRequestError, "label must be"),
        ({"deadline": -1.0}, InvalidRequestError, "deadline must be"),
        ({"model": "critic"}, InvalidRequestError, "model='critic' is reserved"),
    ],
)
def test_what_the_client_refuses_takes_no_number(
    fields: dict[str, Any], error: type[Exception], words: str, rl: Session, double: Double
) -> None:
    arguments = {"tensors": WEIGHTS, "part_bytes": 8, **fields}
    with pytest.raises(error, match=words):
        rl.weights.push(**arguments)
    rl.training.zero_grad().result(60)
    assert rl._connection._numbers["training"] == 1


def test_a_backend_without_parts_gets_one_message_unless_parts_are_asked_for(
    session_factory: SessionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushes, "PART_BYTES", 8)
    double = Double(attrs.evolve(EVERYTHING, operations=EVERYTHING.operations - {"push_part"}))
    rl = session_factory(double)
    rl.weights.push(WEIGHTS).result(60)
    rl.weights.push(WEIGHTS, part_bytes=40).result(60)
    assert double.log == [("push", None)] * 2
    with pytest.raises(UnsupportedError, match="does not offer the operation 'push_part'"):
        rl.weights.push(WEIGHTS, part_bytes=39)


def test_a_push_inside_a_loss_would_wait_for_the_loss(
    rl: Session, double: Double, batch: Batch
) -> None:
    def pushes_itself(batch: Batch, outputs: Any) -> Any:
        rl.weights.push(WEIGHTS, part_bytes=8)

    loss = rl.training.forward_backward(batch, losses.custom(pushes_itself, framework=None))
    with pytest.raises(InvalidRequestError, match=r"push inside the function of losses\.custom"):
        loss.result(60)
    assert "push_part" not in double.names()


# -- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [1, 2, 5])
def test_a_part_that_fails_fails_the_push_alone(
    call: int, session_factory: SessionFactory, double: Double, batch: Batch
) -> None:
    double.faults["push_part", call] = BackendError("no room for it")
    with session_factory(double) as rl:
        rl.training.forward_backward(batch, LOSS)
        push = rl.weights.push(WEIGHTS, part_bytes=8)
        step = rl.training.optim_step(AdamW(lr=0.1))
        with pytest.raises(BackendError, match="no room for it"):
            push.result(60)
        assert step.result(60).version == 1  # nothing was spoilt, and no number is missing
        assert rl.weights.push(WEIGHTS, part_bytes=8).result(60).version == 2
    # the close raises nothing: the parts' own failures are no one's to look at


def test_a_part_that_fails_is_told_once_where_nobody_awaits_the_push(
    session_factory: SessionFactory, double: Double
) -> None:
    double.faults["push_part", 2] = BackendError("no room for it")
    rl = session_factory(double)
    rl.weights.push(WEIGHTS, part_bytes=8)
    with pytest.raises(BackendError, match="no room for it") as caught:
        rl.close()
    assert caught.value.__notes__ == ["raised by push, whose result was not awaited"]


def test_a_failed_push_leaves_the_sampler_its_version(
    session_factory: SessionFactory,
) -> None:
    mock = small_mock(faults={"operation": "push_part", "call": 4})
    rl = session_factory(mock)
    before = served(mock)
    with pytest.raises(BackendError, match="fault"):
        rl.weights.push(own(mock), part_bytes=100).result(60)
    assert served(mock) == before
    assert rl.weights.version().result(60).sampler == 0
    assert rl.weights.push(own(mock), part_bytes=100).result(60).version == 1


def test_another_clients_delivery_in_between_ends_the_push(
    servers: ServerFactory, double: Double
) -> None:
    with connect(servers(double).url) as rl, connect(rl.handle()) as member:
        hold = double.hold("push_part")
        push = rl.weights.push(WEIGHTS, part_bytes=4)
        assert hold.reached.wait(60)
        sync = member.weights.sync()
        member.info().result(60)  # it has come, and stands before most of the parts
        hold.open()
        with pytest.raises(ConflictError, match="no open transfer"):
            push.result(60)
        sync.result(60)
        assert "push" not in double.names()
        assert rl.weights.push(WEIGHTS, part_bytes=4).result(60).version == 1


# -- cancelled, late ----------------------------------------------------------------------------


def test_a_push_that_is_cancelled_before_it_began_sends_nothing(
    rl: Session, double: Double, batch: Batch, messages: list[Message]
) -> None:
    computed = threading.Event()

    def waits(batch: Batch, outputs: Any) -> Any:
        assert computed.wait(60)
        return 0.0, {"logprobs": np.zeros_like(outputs["logprobs"])}

    loss = rl.training.forward_backward(batch, losses.custom(waits, framework=None))
    push = rl.weights.push(WEIGHTS, part_bytes=8)
    push.cancel()
    computed.set()
    loss.result(60)
    with pytest.raises(OperationCancelled):
        push.result(60)
    rl.training.zero_grad().result(60)
    assert submits(messages) == []
    assert double.names() == ["forward", "forward_backward", "zero_grad"]


def test_a_push_that_is_cancelled_on_the_way_changes_nothing(
    session_factory: SessionFactory, double: Double
) -> None:
    with session_factory(double) as rl:
        hold = double.hold("push_part")
        push = rl.weights.push(WEIGHTS, part_bytes=4)
        assert hold.reached.wait(60)
        push.cancel()
        with pytest.raises(OperationCancelled, match="push was cancelled before it started"):
            push.result(60)
        hold.open()
        rl.training.zero_grad().result(60)
        assert double.names().count("push_part") <= 1 + AT_ONCE
        assert "push" not in double.names()
        rl.weights.push(WEIGHTS, part_bytes=16).result(60)


def test_a_deadline_acts_on_the_parts_that_have_not_begun(
    timed: Session, double: Double, batch: Batch, clock: Clock
) -> None:
    hold = double.hold("forward")
    timed.training.forward(batch)
    assert hold.reached.wait(60)
    push = timed.weights.push(WEIGHTS, part_bytes=8, deadline=5.0)
    assert not push.done()
    clock.pass_until_done(timed, push, 5.0)
    with pytest.raises(DeadlineExceededError, match="deadline of push_part passed before it"):
        push.result(60)
    hold.open()
    timed.training.zero_grad().result(60)
    assert double.names() == ["forward", "zero_grad"]


def test_a_deadline_counts_from_the_call(
    rl: Session, double: Double, batch: Batch, messages: list[Message]
) -> None:
    called = threading.Event()

    def takes_long(batch: Batch, outputs: Any) -> Any:
        assert called.wait(60)
        while time.monotonic() <= began + 0.05:
            called.wait(0.01)
        return 0.0, {"logprobs": np.zeros_like(outputs["logprobs"])}

    rl.training.forward_backward(batch, losses.custom(takes_long, framework=None))
    push = rl.weights.push(WEIGHTS, part_bytes=8, deadline=0.05)
    began = time.monotonic()
    called.set()
    with pytest.raises(DeadlineExceededError, match="passed while the tensors of a push were"):
        push.result(60)
    rl.training.zero_grad().result(60)
    assert submits(messages) == []


def test_an_exception_inside_with_ends_a_push_on_its_way(
    session_factory: SessionFactory, double: Double
) -> None:
    hold = double.hold("push_part")
    rl = session_factory(double)

    def loop() -> None:
        with rl:
            rl.weights.push(WEIGHTS, part_bytes=4)
            assert hold.reached.wait(60)
            raise KeyError("the loop's own")

    with pytest.raises(KeyError):
        loop()
    hold.open()
    assert "push" not in double.names()
