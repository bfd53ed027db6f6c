"""What is kept for a client is bounded: beyond its budget new operations are not accepted, and
whatever it takes to make room is."""

import asyncio

import numpy as np
import pytest
from dispatcher_fakes import (
    FORWARD_BACKWARD,
    OPTIM_STEP,
    PATIENCE,
    generate,
    in_loop,
    running,
    settle,
)
from hypothesis import given
from hypothesis import strategies as st

from remote_rl.dispatcher import clients
from remote_rl.dispatcher.budget import FILE_CHUNK, array_bytes, request_bytes
from remote_rl.errors import InvalidRequestError, LeaseError
from remote_rl.messages import Busy, Outcome
from remote_rl.ops import OPERATIONS, Stream
from remote_rl.protocol import TokenizerFiles
from remote_rl.requests import Abandon, Abort, Forward, Push, PushPart, ReadFile, Snapshot
from remote_rl.run_info import FileChunk
from remote_rl.types import Batch, Generation, Outputs, Piece, Ragged, Sample
from remote_rl.wire import decode, encode

#: enough for the arrays of a forward_backward and of a generate, not of two
SIZE = request_bytes(FORWARD_BACKWARD)
assert request_bytes(generate()) < SIZE


def kept(talk, client="a"):
    return talk.dispatcher.gate.clients[client].ledger.kept


# -- how much it is ---------------------------------------------------------------------------


def sample(tokens):
    return Sample(
        tokens=np.zeros(tokens, np.int32),
        logprobs=np.zeros(tokens, np.float32),
        finish_reason="stop",
        first_version=0,
        last_version=0,
        prompt_index=0,
        index=0,
    )


ROWS = Ragged.from_rows([[1, 2, 3], [4]], np.int32)
FLOATS = ROWS.with_values(np.zeros(4, np.float32))


@pytest.mark.parametrize(
    ("value", "size"),
    [
        # offsets are shared by the rows of one object, and counted once
        (Outputs(values={"logprobs": FLOATS, "entropy": FLOATS}, version=0), 16 + 24),
        (Outputs(values={"logprobs": FLOATS, "entropy": ROWS}, version=0), 16 + 16 + 24),
        (sample(5), 20 + 20),
        (Generation.from_samples([sample(5)]), 40 + 2 * 16 + 1 + 8 + 8 + 4 + 4),
        (FileChunk(data=b"12345", size=9), 5),
        (TokenizerFiles(kind="huggingface", files={"a": b"123", "b": b"4"}), 4),
        (Push(tensors={"w": np.zeros((2, 3), np.float64), "b": np.zeros(1, np.uint8)}), 49),
        (PushPart(transfer="t", pieces={"w": Piece(offset=0, data=np.zeros(7, np.uint8))}), 7),
        (Abandon(reason="a long text"), 0),
        (None, 0),
    ],
)
def test_all_arrays_are_counted_wherever_they_lie(value, size):
    assert array_bytes(value) == size


def test_a_piece_of_a_file_is_counted_by_its_answer():
    asked = {"kind": "checkpoint", "name": "a", "path": "b", "offset": 0}
    assert request_bytes(ReadFile(**asked, length=100)) == 100
    assert request_bytes(ReadFile(**asked, length=2**40)) == FILE_CHUNK


@pytest.mark.parametrize("budget", [0, -1, 1.5, True, "4G", None])
@in_loop
async def test_a_budget_is_a_whole_number_of_bytes(budget):
    with pytest.raises(InvalidRequestError, match="budget_bytes must be a whole number"):
        async with running(budget_bytes=budget):
            pass


# -- what is kept -----------------------------------------------------------------------------


@in_loop
async def test_requests_count_until_they_end_and_results_until_they_are_acknowledged():
    async with running() as talk:
        gate = talk.backend.hold("forward")
        await talk.submit("forward", 1, Forward(batch=FORWARD_BACKWARD.batch))
        await talk.submit("forward_backward", 3, FORWARD_BACKWARD)  # held: 2 has not come
        assert kept(talk) == 2 * SIZE
        gate.open()
        outcome = await talk.outcome("forward", 1, Forward(batch=FORWARD_BACKWARD.batch))
        assert kept(talk) == array_bytes(outcome.result) + SIZE
        await talk.renew()
        assert kept(talk) == array_bytes(outcome.result) + SIZE
        await talk.wait(acknowledged=[("training", 1)])
        assert kept(talk) == SIZE
        await talk.cancel("forward_backward", 3)
        await talk.wait(acknowledged=[("training", 3)])
        assert kept(talk) == 0


@in_loop
async def test_samples_of_a_running_generate_count():
    async with running() as talk:
        gate = talk.backend.hold("generate")
        await talk.submit("generate", 1, generate(n=3))
        await settle()
        request = request_bytes(generate(n=3))
        assert kept(talk) == request + array_bytes(talk.backend._sample(generate(), 0, "stop"))
        gate.open()
        result = await talk.result("generate", 1, generate(n=3))
        assert kept(talk) == array_bytes(result)


@in_loop
async def test_a_result_that_shares_rows_with_its_request_counts_the_message_it_lies_in():
    """Views into a received body keep all of it in memory."""
    asked = Forward(
        batch=Batch(prompts=[[1] * 1000], prompt_index=[0], responses=[[2, 3]], temperature=1.0)
    )
    async with running() as talk:
        received = decode(b"".join(bytes(part) for part in encode(asked).parts))
        await talk.result("forward", 1, received)
        assert kept(talk) > request_bytes(asked) > 4000
        await talk.renew()
        await talk.wait(acknowledged=[("training", 1)])
        assert kept(talk) == 0
        await talk.result("forward", 2, asked)  # of its own memory
        assert kept(talk) < 100


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "cancel", "open", "acknowledge"]),
        st.sampled_from(["forward_backward", "forward", "generate"]),
        st.integers(1, 4),
    ),
    max_size=25,
)


@given(STEPS)
def test_nothing_stays_counted_once_all_has_ended_and_is_acknowledged(steps):
    async def script():
        async with running() as talk:
            requests = {
                "forward_backward": FORWARD_BACKWARD,
                "forward": Forward(batch=FORWARD_BACKWARD.batch),
                "generate": generate(n=2),
            }
            talk.backend.hold("generate")
            names = {}
            for step, name, number in steps:
                key = (OPERATIONS[name].stream.value, number)
                name = names.get(key, name)
                if step == "submit" and key not in names:
                    names[key] = name
                    await talk.submit(name, number, requests[name])
                elif step == "cancel" and key not in names:
                    names[key] = name
                    await talk.cancel(name, number)
                elif step == "open":
                    talk.backend.gates["generate"].open()
                elif step == "acknowledge":
                    await talk.wait(acknowledged=[key])
                await settle()
                client = talk.dispatcher.gate.clients["a"]
                assert client.ledger.kept == sum(each.kept for each in client.records())
                assert client.ledger.kept >= 0
            for number in range(1, 5):  # no gap stays
                if ("training", number) not in names:
                    await talk.submit("zero_grad", number)
            talk.backend.gates["generate"].open()
            await settle()
            keys = [(stream.value, number) for stream in Stream for number in range(1, 5)]
            await talk.wait(acknowledged=keys)
            assert kept(talk) == 0

    asyncio.run(script())


# -- who may come in --------------------------------------------------------------------------


@in_loop
async def test_beyond_the_budget_a_new_operation_is_not_accepted_and_its_number_stays_free():
    async with running(budget_bytes=SIZE) as talk:
        await talk.submit("forward_backward", 2, FORWARD_BACKWARD)  # held
        busy = await talk.submit("forward_backward", 3, FORWARD_BACKWARD)
        assert isinstance(busy, Busy)
        assert (busy.kept, busy.budget, busy.retry_after > 0) == (SIZE, SIZE, True)
        assert not (await talk.wait()).outcomes
        await talk.result("zero_grad", 1)
        await talk.wait(acknowledged=[("training", 1), ("training", 2)])
        # another operation takes the number: nothing was kept of the refused one
        assert (await talk.result("zero_grad", 3)).version == 0


@in_loop
async def test_a_client_that_keeps_nothing_is_let_in_whatever_its_size():
    async with running(budget_bytes=1) as talk:
        for number in (1, 2, 3):
            await talk.result("forward_backward", number, FORWARD_BACKWARD)
            await talk.wait(acknowledged=[("training", number)])
        await talk.result("generate", 7, generate())


@in_loop
async def test_the_number_that_all_others_wait_for_always_comes_in():
    async with running(budget_bytes=1) as talk:
        assert not (await talk.submit("forward_backward", 4, FORWARD_BACKWARD)).done
        for number in (3, 2):  # not next, and something is kept
            assert isinstance(await talk.submit("forward", number, FORWARD), Busy)
        await talk.result("forward", 1, FORWARD)
        await talk.result("forward", 2, FORWARD)  # nothing was acknowledged
        await talk.result("forward", 3, FORWARD)
        await talk.result("forward_backward", 4, FORWARD_BACKWARD)


FORWARD = Forward(batch=FORWARD_BACKWARD.batch)


@in_loop
async def test_each_stream_may_keep_one_so_that_no_stream_waits_for_another():
    """The function of a custom loss may generate, while what was called after the loss waits."""
    async with running(budget_bytes=1) as talk:
        await talk.submit("forward_backward", 2, FORWARD_BACKWARD)
        await talk.result("generate", 1, generate())
        assert isinstance(await talk.submit("generate", 2, generate()), Busy)
        await talk.wait(acknowledged=[("sampling", 1)])
        await talk.result("generate", 2, generate())


@in_loop
async def test_what_makes_room_or_takes_none_is_never_refused():
    async with running(budget_bytes=1) as talk:
        talk.backend.hold("generate")
        await talk.submit("generate", 1, generate())
        await talk.submit("forward_backward", 3, FORWARD_BACKWARD)
        for number, name in enumerate(("pause", "resume", "reset_prefix_cache"), 1):
            await talk.result(name, number)
        for number, name in enumerate(("info", "tokenizer"), 1):
            await talk.result(name, number)
        for number, name in enumerate(("zero_grad", "snapshot", "optim_step"), 4):
            request = {"optim_step": OPTIM_STEP, "snapshot": Snapshot(name="s")}
            answer = await talk.submit(name, number, request.get(name))
            assert isinstance(answer, Outcome)
        assert isinstance(await talk.submit("abandon", 2, Abandon(reason="it failed")), Outcome)
        assert await talk.cancel("generate", 9)
        assert await talk.cancel("forward_backward", 3)
        await talk.result("abort", 4)


@in_loop
async def test_a_resent_operation_is_found_whatever_is_kept():
    async with running(budget_bytes=1) as talk:
        await talk.submit("forward_backward", 2, FORWARD_BACKWARD, digest="d")
        await talk.submit("forward", 1, FORWARD, digest="e")
        await settle()
        assert (await talk.submit("forward_backward", 2, FORWARD_BACKWARD, digest="d")).done
        assert (await talk.submit("forward", 1, FORWARD, digest="e")).done
        assert isinstance(await talk.submit("forward", 4, FORWARD), Busy)


@in_loop
async def test_the_budget_is_each_clients_own():
    async with running(budget_bytes=1) as talk:
        epoch = (await talk.grant("a")).epoch
        await talk.grant("b", instance_id=talk.instance_id, epoch=epoch)
        await talk.submit("forward", 2, FORWARD)
        assert isinstance(await talk.submit("forward", 3, FORWARD), Busy)
        await talk.result("forward", 1, FORWARD, client="b")
        assert kept(talk, "b") < kept(talk, "a") == SIZE


# -- patience ---------------------------------------------------------------------------------


@in_loop
async def test_the_answer_waits_for_room_as_long_as_its_patience():
    async with running(budget_bytes=SIZE) as talk:
        gate = talk.backend.hold("forward")
        await talk.submit("forward", 1, FORWARD)
        late = asyncio.ensure_future(talk.submit("generate", 1, generate()))
        assert isinstance(await late, Outcome)  # the first of its stream
        late = asyncio.ensure_future(talk.submit("forward", 3, FORWARD, patience=PATIENCE))
        await settle()
        assert not late.done()
        gate.open()
        await settle()
        assert not late.done()  # its result isn't acknowledged yet
        await talk.wait(acknowledged=[("training", 1), ("sampling", 1)])
        assert not (await late).done
        assert kept(talk) == SIZE
        assert isinstance(await talk.submit("forward", 4, FORWARD, patience=0.01), Busy)


@in_loop
async def test_what_waits_for_room_comes_in_once_it_is_next():
    async with running(budget_bytes=1) as talk:
        await talk.submit("forward", 3, FORWARD)
        second = asyncio.ensure_future(talk.submit("forward", 2, FORWARD, patience=PATIENCE))
        await settle()
        assert not second.done()
        await talk.submit("zero_grad", 1)
        assert isinstance(await second, Outcome)


@in_loop
async def test_two_copies_that_wait_for_room_are_one_operation():
    async with running(budget_bytes=1) as talk:
        talk.backend.hold("forward").open()
        await talk.submit("forward", 3, FORWARD)
        copies = [
            asyncio.ensure_future(
                talk.submit("forward", 2, FORWARD, digest="d", patience=PATIENCE, linger=PATIENCE)
            )
            for _ in range(3)
        ]
        await settle()
        await talk.submit("zero_grad", 1)
        outcomes = await asyncio.gather(*copies)
        assert all(outcome.done and outcome.error is None for outcome in outcomes)
        await talk.result("forward", 3, FORWARD)
        assert talk.backend.calls.count("forward") == 2


@in_loop
async def test_whoever_waits_for_room_hears_of_the_end_of_its_lease():
    async with running(budget_bytes=1) as talk:
        await talk.submit("forward", 3, FORWARD)
        waiting = asyncio.ensure_future(talk.submit("forward", 2, FORWARD, patience=PATIENCE))
        await settle()
        await talk.detach()
        with pytest.raises(LeaseError, match="it detached"):
            await waiting
        assert "forward" not in talk.backend.calls


# -- aborts of what comes later ---------------------------------------------------------------


def reasons(generation):
    return [sample.finish_reason for sample in generation.samples()]


@in_loop
async def test_an_abort_means_generates_that_come_after_it_but_were_called_before():
    async with running() as talk:
        talk.backend.hold("generate")
        await talk.submit("generate", 2, generate(n=2))
        await talk.result("abort", 1, generates_before=3)
        for number in (1, 3):
            assert reasons(await talk.result("generate", number, generate(n=2)))[1] == "abort"
        assert not (await talk.submit("generate", 4, generate(n=2))).done


@in_loop
async def test_an_abort_by_id_means_those_that_come_after_it():
    async with running() as talk:
        talk.backend.hold("generate")
        ids = [
            "a:sampling:2",
            "b:sampling:1",
            "a:sampling:x",
            "sampling:3",
            "a:sampling:" + "9" * 99,
        ]
        await talk.result("abort", 1, Abort(request_ids=ids))
        assert reasons(await talk.result("generate", 2, generate(n=2)))[1] == "abort"
        for number in (1, 3):
            assert not (await talk.submit("generate", number, generate(n=2))).done


@in_loop
async def test_operations_without_arrays_are_bounded_in_number(monkeypatch):
    monkeypatch.setattr(clients, "_MOST_RECORDS", 3)
    async with running() as talk:
        for number in (1, 2, 3):
            await talk.result("info", number)
        refused = await talk.submit("info", 4)
        assert isinstance(refused, Busy)
        assert (await talk.submit("version", 1, linger=PATIENCE)).done  # the next in its order
        await talk.wait(acknowledged=[("query", 1)])
        assert isinstance(await talk.submit("info", 4), Outcome)


@in_loop
async def test_an_aborted_generates_number_is_forgotten_with_it():
    async with running() as talk:
        client = talk.dispatcher.gate.clients["a"]
        await talk.result("abort", 1, Abort(request_ids=("a:sampling:5",)))
        assert client.was_aborted(5)
        assert not client.was_aborted(4)
        await talk.result("generate", 5, generate())
        await talk.wait(acknowledged=[("sampling", 5)])
        assert not client.was_aborted(5)
