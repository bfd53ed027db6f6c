"""Numbers, duplicates, gaps and tombstones of one client, as pure state."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_rl.dispatcher.record import Record, State
from remote_rl.dispatcher.streams import ClientStream, NumberSet
from remote_rl.errors import ConflictError, OperationCancelled
from remote_rl.ops import OPERATIONS, Stream
from remote_rl.requests import ZeroGrad

numbers = st.lists(st.integers(1, 40))


@given(numbers, numbers)
def test_number_set_is_a_set(added, asked):
    kept = NumberSet()
    for number in added:
        kept.add(number)
    for number in (*added, *asked):
        assert (number in kept) == (number in set(added))


@given(st.permutations(range(1, 30)))
def test_number_set_of_an_interval_holds_nothing_above_its_watermark(order):
    kept = NumberSet()
    for number in order:
        kept.add(number)
    assert (kept._up_to, kept._above) == (29, set())


def record(number, operation="zero_grad", digest="d"):
    row = OPERATIONS[operation]
    return Record(
        client_id="a",
        key=(row.stream.value, number),
        operation=row,
        request=ZeroGrad(),
        digest=digest,
        accepted=0.0,
    )


def numbers_of(records):
    return [each.key[1] for each in records]


@given(st.permutations(range(1, 9)))
def test_sequenced_records_come_out_in_order_whatever_the_arrival(order):
    stream, released = ClientStream(Stream.TRAINING), []
    for count, number in enumerate(order, 1):
        released += numbers_of(stream.add(record(number)))
        arrived = set(order[:count])
        held = next(n for n in range(1, 10) if n not in arrived)
        assert released == list(range(1, held))  # everything before the first gap, nothing after
    assert stream.highest == 8


@given(st.permutations(range(1, 9)))
def test_unsequenced_records_come_out_as_they_arrive(order):
    stream = ClientStream(Stream.SAMPLING)
    assert [numbers_of(stream.add(record(number))) for number in order] == [[n] for n in order]


def test_a_duplicate_finds_the_first_record():
    stream = ClientStream(Stream.TRAINING)
    first = record(1)
    assert stream.find(1, "zero_grad", "d") is None
    stream.add(first)
    assert stream.find(1, "zero_grad", "d") is first
    first.settle(result="done")
    assert stream.find(1, "zero_grad", "d") is first
    assert list(stream) == [first]


@pytest.mark.parametrize(("operation", "digest"), [("zero_grad", "other"), ("version", "d")])
def test_a_used_number_is_nothing_else(operation, digest):
    stream = ClientStream(Stream.TRAINING)
    stream.add(record(1))
    message = f"training number 1 is already a zero_grad of other contents; this {operation}"
    with pytest.raises(ConflictError, match=message) as caught:
        stream.find(1, operation, digest)
    assert caught.value.details == {"number": 1}


def test_an_acknowledged_number_is_gone_for_good():
    stream = ClientStream(Stream.TRAINING)
    first = record(1)
    stream.add(first)
    stream.acknowledge(1)
    assert stream.get(1) is first  # not finished, so not forgotten
    first.settle(result="done")
    stream.acknowledge(1)
    stream.acknowledge(1)
    assert stream.get(1) is None
    with pytest.raises(ConflictError, match="operation 1 was finished and acknowledged"):
        stream.find(1, "zero_grad", "d")
    assert stream.find(2, "zero_grad", "d") is None


def test_a_tombstone_answers_whatever_its_number_was_meant_for():
    stream = ClientStream(Stream.TRAINING)
    buried = record(2, digest=None)
    buried.tombstone = True
    buried.settle(error=OperationCancelled("cancelled"))
    assert stream.add(buried) == ()
    assert stream.find(2, "zero_grad", "any digest") is buried
    with pytest.raises(ConflictError, match="already a zero_grad"):
        stream.find(2, "optim_step", "any digest")
    assert numbers_of(stream.add(record(1))) == [1, 2]  # it has its turn, and holds nothing up


def test_a_tombstone_acknowledged_before_its_turn_still_holds_its_place():
    stream = ClientStream(Stream.TRAINING)
    buried = record(2)
    buried.tombstone = True
    buried.settle(error=OperationCancelled("cancelled"))
    stream.add(buried)
    stream.acknowledge(2)
    with pytest.raises(ConflictError, match="finished and acknowledged"):
        stream.find(2, "zero_grad", "d")
    assert numbers_of(stream.add(record(1))) == [1, 2]
    assert numbers_of(stream.add(record(3))) == [3]
    assert numbers_of(stream) == [1, 3]


def test_a_settled_record_lets_go_of_its_request_and_samples():
    one = record(1)
    one.samples.append("sample")
    one.settle(result="done")
    assert (one.state, one.done, one.samples) == (State.DONE, True, [])
    assert not isinstance(one.request, ZeroGrad)
    outcome = one.outcome()
    assert (outcome.stream, outcome.number, outcome.done, outcome.result, outcome.error) == (
        "training",
        1,
        True,
        "done",
        None,
    )
