"""Whatever the contract can say arrives as it was said, without copies and without pickle."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from frame_mutations import assemble, split
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from wire_examples import BATCH, EXAMPLES, FLOATS, assert_same

from remote_rl import Batch, Ragged, SamplingParams, errors, losses, requests
from remote_rl.errors import InvalidRequestError, RemoteRLError
from remote_rl.messages import Outcome
from remote_rl.types.results import Outputs
from remote_rl.wire import ALIGNMENT, decode, digest, encode
from remote_rl.wire.vocabulary import wire_classes


def through(value: Any) -> Any:
    return decode(b"".join(encode(value).parts))


@pytest.mark.parametrize("value", EXAMPLES, ids=lambda value: type(value).__name__)
def test_every_class_arrives_as_it_was_sent(value: Any) -> None:
    assert_same(value, through(value))


def test_the_examples_cover_every_class_of_the_wire() -> None:
    assert {type(value).__name__ for value in EXAMPLES} == set(wire_classes())


@pytest.mark.parametrize("name", sorted(set(errors.__all__) - {"RemoteRLError"}))
def test_every_error_arrives_as_its_class_with_details_and_cause(name: str) -> None:
    sent = getattr(errors, name)("what, where, what to do", row=3, message="a detail", self=None)
    sent.__cause__ = KeyError("inner")
    received = through(sent)
    assert type(received) is type(sent)
    assert received.message == sent.message
    assert received.details == sent.details
    assert isinstance(received.__cause__, errors.BackendError)
    assert "KeyError: 'inner'" in str(received.__cause__)


def test_a_long_chain_of_causes_is_cut_and_arrives() -> None:
    error: RemoteRLError = InvalidRequestError("innermost")
    for depth in range(100):
        outer = InvalidRequestError(f"level {depth}")
        outer.__cause__ = error
        error = outer
    assert str(through(error)) == "level 99"


def test_fields_of_the_loop_stay_with_the_loop() -> None:
    local = BATCH.replace(
        sampling_logprobs=FLOATS,
        policy_version=np.array([1, 2, 3]),
        extras={"reward": np.array([object(), "text", 1.5], dtype=object)},
    )
    received = through(local)
    assert received.sampling_logprobs is None
    assert received.policy_version is None
    assert received.extras == {}
    assert digest(local) == digest(received)


def test_arrays_are_sent_and_received_without_a_copy() -> None:
    frame = encode(BATCH)
    sent = [np.frombuffer(part, np.uint8) for part in frame.parts if len(part)]
    assert any(np.shares_memory(part, BATCH.responses.values) for part in sent)
    body = b"".join(frame.parts)
    received = decode(body)
    whole = np.frombuffer(body, np.uint8)
    for array in (received.responses.values, received.advantages.values, received.prompt_index):
        assert np.shares_memory(array, whole)
        assert not array.flags.writeable


def test_one_array_of_several_fields_crosses_once() -> None:
    shared = Batch(prompts=[[1]], prompt_index=[0], responses=[[1] * 1000], temperature=1.0)
    ones = shared.responses.with_values(np.ones(1000, np.float32))
    batch = shared.replace(advantages=ones, old_logprobs=ones)
    apart = shared.replace(
        advantages=Ragged(np.ones(1000, np.float32), ones.offsets.copy()),
        old_logprobs=Ragged(np.ones(1000, np.float32), ones.offsets.copy()),
    )
    assert encode(apart).nbytes - encode(batch).nbytes >= 4000
    received = through(batch)
    assert received.advantages.values is received.old_logprobs.values
    assert received.advantages.offsets is received.responses.offsets
    assert_same(batch, received)


def test_every_array_begins_at_a_multiple_of_the_alignment() -> None:
    position = 0
    for part in encode(BATCH).parts:
        assert position % ALIGNMENT == 0 or len(part) < ALIGNMENT
        position += len(part)
    assert position == encode(BATCH).nbytes
    assert position % ALIGNMENT == 0


def test_thousands_of_small_arrays_travel_together_and_a_large_one_uncopied() -> None:
    large = np.arange(1 << 20, dtype=np.int32)
    several = {str(index): np.full(3, index) for index in range(5000)} | {"large": large}
    frame = encode(several)
    assert len(frame.parts) > 5000
    chunks = list(frame.chunks(1 << 20))
    assert len(chunks) < frame.nbytes / (32 << 10)
    assert b"".join(chunks) == b"".join(frame.parts)
    whole = [chunk for chunk in chunks if len(chunk) == 1 << 20]
    assert all(np.shares_memory(np.frombuffer(chunk, np.uint8), large) for chunk in whole)
    assert len(whole) == 4


def test_chunks_are_the_parts_in_pieces() -> None:
    frame = encode(BATCH)
    chunks = list(frame.chunks(7))
    assert max(map(len, chunks)) == 7
    assert b"".join(chunks) == b"".join(frame.parts)


@pytest.mark.parametrize("transform", [np.asfortranarray, lambda x: x[::-1], lambda x: x[:, ::2]])
def test_any_memory_layout_and_byte_order_arrives(transform: Any) -> None:
    array = transform(np.arange(24, dtype=np.float32).reshape(4, 6))
    assert_same(np.ascontiguousarray(array), through(array))
    big = array.astype(">f4")
    received = through(big)
    assert received.dtype == np.dtype("<f4")
    np.testing.assert_array_equal(received, array)


def test_what_is_no_object_of_the_contract_is_refused_by_its_name() -> None:
    with pytest.raises(InvalidRequestError, match=r"builtins\.object"):
        encode(Outcome(stream="training", number=1, done=True, result=object()))
    with pytest.raises(InvalidRequestError, match="dtype object"):
        encode(np.array([object()]))


def test_a_subclass_does_not_pass_for_its_class() -> None:
    class Mine(losses.PPO):  # type: ignore[misc]
        pass

    with pytest.raises(InvalidRequestError, match="Mine"):
        encode(requests.ForwardBackward(batch=BATCH, loss=Mine()))


def test_a_header_that_the_other_side_would_refuse_is_not_sent() -> None:
    with pytest.raises(InvalidRequestError, match="in pieces"):
        encode({"text": "x" * (64 << 20)})


def test_sampling_parameters_of_an_older_peer_are_understood() -> None:
    params = SamplingParams(n=2, max_tokens=9, stop=("a",))
    header, payload = split(b"".join(encode(params).parts))
    for name in ("min_tokens", "include_stop"):
        del header["tree"][name]
    assert decode(assemble(json.dumps(header).encode(), payload)) == params


def test_the_digest_tells_requests_apart_and_nothing_else() -> None:
    one = requests.ForwardBackward(batch=BATCH, loss=losses.PPO())
    same = requests.ForwardBackward(batch=BATCH.replace(), loss=losses.PPO())
    other_loss = requests.ForwardBackward(batch=BATCH, loss=losses.PPO(clip_low=0.25))
    values = FLOATS.values.copy()
    values[-1] = 0.0  # it was -0.0
    other_bit = requests.ForwardBackward(
        batch=BATCH.replace(advantages=FLOATS.with_values(values)), loss=losses.PPO()
    )
    digests = [digest(each) for each in (one, same, other_loss, other_bit)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
    assert len(digests[0]) == 32


RAGGED = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=6), max_size=8)
DTYPES = st.sampled_from(["?", "u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8"])


@given(DTYPES.flatmap(lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_side=0))))
def test_any_array_arrives_bit_for_bit(array: Any) -> None:
    assert_same(array, through(array))


@given(RAGGED)
def test_any_ragged_arrives(rows: list[list[int]]) -> None:
    ragged = Ragged.from_rows(rows, np.int32)
    assert_same(ragged, through(ragged))


@given(RAGGED, st.data())
def test_any_batch_arrives(rows: list[list[int]], data: st.DataObject) -> None:
    responses = Ragged.from_rows(rows, np.int32)
    count = len(responses.values)
    floats = arrays.arrays(
        np.float32, count, elements=st.floats(allow_nan=False, allow_infinity=False, width=32)
    )
    batch = Batch(
        prompts=[[1], [2, 3]],
        prompt_index=np.arange(len(rows)) % 2,
        responses=responses,
        temperature=0.7,
        advantages=responses.with_values(data.draw(floats)),
    )
    received = through(batch)
    assert_same(batch, received)
    assert received == batch


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    )
)
def test_any_metadata_of_json_values_arrives(value: Any) -> None:
    sent = requests.Save(name="a", metadata={"value": value})
    assert_same(sent, through(sent))


def test_outputs_share_their_offsets_after_the_journey() -> None:
    received = through(Outputs(values={"logprobs": FLOATS, "entropy": FLOATS}, version=1))
    assert received.logprobs.offsets is received.entropy.offsets
