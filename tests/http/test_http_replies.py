"""Replies that don't fit a frame: what is too large fails alone, and the session goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from http_support import LEASED, Scripted, in_loop, pair

from backends.mock import create
from remote_rl import SamplingParams, connect
from remote_rl.errors import BackendError, InvalidRequestError
from remote_rl.messages import Outcome, Wait, Waited
from remote_rl.requests import Save
from remote_rl.run_info import CheckpointList
from remote_rl.testing import LoopbackServer
from remote_rl.types.fields import MOST_JSON_BYTES
from remote_rl.types.results import CheckpointInfo
from remote_rl.wire.frames import MAX_HEADER

WAIT = Wait(timeout=1, **LEASED)


def failed(number: int, size: int) -> Outcome:
    error = BackendError("x" * size)
    return Outcome(stream="sampling", number=number, done=True, error=error)


@in_loop
async def test_outcomes_that_do_not_fit_together_come_one_after_the_other() -> None:
    large = MAX_HEADER // 3
    scripted = Scripted(Waited(outcomes=[failed(number, large) for number in (1, 2, 3, 4)]))
    async with pair(scripted) as transport:
        waited = await transport.call(WAIT, 30)
    assert [outcome.number for outcome in waited.outcomes] == [1]
    assert len(waited.outcomes[0].error.message) == large


@in_loop
async def test_an_error_that_fits_no_frame_is_cut_to_one_that_does() -> None:
    outcomes = [failed(1, MAX_HEADER + 1), failed(2, 10)]
    async with pair(Scripted(Waited(outcomes=outcomes))) as transport:
        waited = await transport.call(WAIT, 30)
    assert [outcome.number for outcome in waited.outcomes] == [1, 2]
    assert "has ended, but the BackendError of it can't cross" in waited.outcomes[0].error.message
    assert waited.outcomes[1].error.message == "x" * 10


@in_loop
async def test_a_result_that_fits_no_frame_fails_its_operation() -> None:
    info = CheckpointInfo(
        name="a",
        version=0,
        optimizer=True,
        reference=False,
        metadata={"text": "y" * (MOST_JSON_BYTES - 100)},
    )
    listed = CheckpointList(checkpoints=[info] * 20)
    reply = Outcome(stream="training", number=1, done=True, result=listed)
    async with pair(Scripted(reply)) as transport:
        answer = await transport.call(WAIT, 30)
    assert answer.result is None
    assert "the result can't cross the wire" in str(answer.error)


def test_hundreds_of_long_failures_end_their_own_operations_only() -> None:
    backend = create(vocab_size=8, embedding_size=2, hidden_size=2, eos_token_ids=())

    async def generate(request: object, context: object) -> None:
        raise ValueError("z" * 60_000)

    backend.sampling.generate = generate
    server = LoopbackServer(backend)
    with connect(server.url) as rl:
        params = SamplingParams(max_tokens=1)
        for operation in [rl.sampling.generate([[1]], params) for _ in range(400)]:
            with pytest.raises(BackendError, match="ValueError: zzz"):
                operation.result(60)
        rl.training.zero_grad().result(60)
    server.stop()


def test_metadata_of_more_than_a_mebibyte_is_refused_at_the_call(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"Save.metadata has .* more than the 1048576"):
        Save(name="a", metadata={"text": "y" * MOST_JSON_BYTES})
