"""The digest of a large request is taken while it is sent, and is the one of the request alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash

from remote_rl.errors import InvalidRequestError
from remote_rl.losses import PPO
from remote_rl.messages import Submit
from remote_rl.requests import ForwardBackward, ZeroGrad
from remote_rl.types import Batch, Ragged
from remote_rl.wire import decode, digest, encode, seal
from remote_rl.wire.codec import LATE_BYTES

LEASED = {"client_id": "c", "instance_id": "i", "acknowledged": [("training", 3)]}


def request_of(tokens: int, last: int = 7) -> ForwardBackward:
    """A request of one response; `last` is its last token."""
    responses = Ragged(np.arange(tokens, dtype=np.int32), np.array([0, tokens]))
    responses.values[-1] = last
    floats = responses.with_values(np.linspace(-1, 1, tokens, dtype=np.float32))
    batch = Batch(
        prompts=[[1, 2]],
        prompt_index=[0],
        responses=responses,
        temperature=1.0,
        advantages=floats,
        old_logprobs=floats,
    )
    return ForwardBackward(batch=batch, loss=PPO())


def submit(request: Any, sealed: Any) -> Submit:
    """Operation 4."""
    operation = "zero_grad" if isinstance(request, ZeroGrad) else "forward_backward"
    return Submit(operation=operation, number=4, request=request, digest=sealed, **LEASED)


LARGE = request_of(LATE_BYTES)


@pytest.mark.parametrize("size", [1 << 10, 100_003, 1 << 20, 1 << 30])
def test_a_large_request_is_hashed_on_its_way(size: int) -> None:
    sealed = seal(LARGE)
    frame = encode(submit(LARGE, sealed))
    assert sealed.taken is None
    sent = b"".join(frame.chunks(size))
    assert len(sent) == frame.nbytes
    assert sealed.taken is not None
    received = decode(sent)
    assert received.digest == digest(LARGE) == sealed.text()
    assert received.request.batch == LARGE.batch
    assert dict(received.request.loss.__getstate__()) == dict(LARGE.loss.__getstate__())


def test_it_is_the_hash_of_the_frame_of_the_request_alone() -> None:
    for request in (LARGE, ZeroGrad()):
        assert digest(request) == xxhash.xxh3_128(b"".join(encode(request).parts)).hexdigest()


def test_each_piece_is_taken_in_when_the_next_one_is_wanted() -> None:
    sealed = seal(LARGE)
    pieces = encode(submit(LARGE, sealed)).chunks(1 << 20)
    for piece in pieces:
        if sealed.taken is not None:
            # the last, with the padding before it and its own: 16 bytes of digest
            assert len(piece) < 256
            assert sealed.text() == piece[-64:-48].hex()
    assert sealed.taken is not None


def test_a_sending_that_breaks_off_leaves_the_digest_open_for_the_next() -> None:
    sealed = seal(LARGE)
    pieces = encode(submit(LARGE, sealed)).chunks(1 << 20)
    next(pieces)
    next(pieces)
    pieces.close()
    assert sealed.taken is None
    again = decode(b"".join(encode(submit(LARGE, sealed)).parts))
    later = decode(b"".join(encode(submit(LARGE, sealed)).parts))
    assert again.digest == later.digest == digest(LARGE)


def test_two_sendings_at_once_give_the_same_digest() -> None:
    sealed = seal(LARGE)
    frames = [encode(submit(LARGE, sealed)).chunks(1 << 20) for _ in range(2)]
    sent: list[list[Any]] = [[], []]
    for _ in range(100):
        for frame, into in zip(frames, sent):
            into += [bytes(piece) for piece in [next(frame, b"")]]
    first, second = (decode(b"".join(pieces)) for pieces in sent)
    assert first.digest == second.digest == digest(LARGE)


def test_a_small_request_and_a_text_travel_as_they_are() -> None:
    small = ZeroGrad()
    sealed = seal(small)
    frame = encode(submit(small, sealed))
    assert decode(b"".join(frame.parts)).digest == sealed.text() == digest(small)
    assert decode(b"".join(encode(submit(small, "mine")).parts)).digest == "mine"
    assert decode(b"".join(encode(submit(small, None)).parts)).digest is None


def test_other_contents_have_another_digest_however_it_is_sent() -> None:
    other = request_of(LATE_BYTES, last=8)
    assert digest(other) != digest(LARGE)
    sent = b"".join(encode(submit(other, seal(other))).parts)
    assert decode(sent).digest == digest(other)


@pytest.mark.parametrize(
    "given", [np.zeros(0, np.uint8), np.zeros(65, np.uint8), np.zeros(4, np.int32), 3, b"text"]
)
def test_what_is_no_digest_is_refused(given: Any) -> None:
    with pytest.raises(InvalidRequestError, match="digest"):
        submit(ZeroGrad(), given)


def test_a_client_of_another_kind_may_send_bytes() -> None:
    assert submit(ZeroGrad(), np.arange(4, dtype=np.uint8)).digest == "00010203"
