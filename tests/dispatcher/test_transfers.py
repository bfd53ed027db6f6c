"""Pushes in parts: what of a transfer is let through, what ends it, and what that leaves alone."""

import attrs
import numpy as np
import pytest
from dispatcher_fakes import FORWARD_BACKWARD, OPTIM_STEP, FakeBackend, in_loop, receipt, running
from hypothesis import given
from hypothesis import strategies as st

from remote_rl.dispatcher.transfers import Transfers
from remote_rl.errors import BackendError, ConflictError, InvalidRequestError, OperationCancelled
from remote_rl.ops import OPERATIONS
from remote_rl.requests import Push, PushPart, Request, Reset, Sync
from remote_rl.types import Piece, TensorForm

FORMS = {
    "w": TensorForm(shape=(2, 3), dtype="float32"),  # 24 bytes
    "empty": TensorForm(shape=(0, 3), dtype="float32"),
    "b": TensorForm(shape=(5,), dtype="float16"),  # 10
}


def opening(transfer="t", forms=FORMS):
    return PushPart(transfer=transfer, forms=forms)


def part(transfer="t", **places):
    """places: a tensor's name to (first byte, byte after the last)."""
    pieces = {
        name: Piece(offset=start, data=np.zeros(stop - start, np.uint8))
        for name, (start, stop) in places.items()
    }
    return PushPart(transfer=transfer, pieces=pieces)


WHOLE = part(w=(0, 24), b=(0, 10))
COMMIT = Push(transfer="t")
TENSORS = Push(tensors={"w": np.zeros((2, 3), np.float32)})


class Pushed(FakeBackend):
    """Takes pushes, too, and keeps the requests of parts."""

    def __init__(self):
        super().__init__()
        self.capabilities = attrs.evolve(
            self.capabilities, push_dtypes={"float16", "float32"}, in_flight={"keep", "wait"}
        )
        self.parts = []

    async def push_part(self, request, context):
        self.parts.append(request)
        return await self._do("push_part", context)

    async def push(self, request, context):
        return await self._do("push", context, receipt(context.next_version))


# -- pure state ---------------------------------------------------------------------------------


def do(transfers, request, client="a"):
    """One operation that succeeds in the backend."""
    names = {Push: "push", PushPart: "push_part", Sync: "sync", Reset: "reset"}
    row = OPERATIONS[names.get(type(request), "zero_grad")]
    part_of = transfers.check(client, row, request)
    transfers.begin(row)
    transfers.succeeded(part_of, request)


@given(st.lists(st.tuples(st.sampled_from(["w", "b"]), st.integers(1, 4)), max_size=30))
def test_a_transfer_is_whole_when_every_byte_has_come_once_in_order(cuts):
    transfers, came = Transfers(), {"w": 0, "empty": 0, "b": 0}
    do(transfers, opening())
    for name, elements in cuts:
        form = FORMS[name]
        stop = came[name] + elements * form.itemsize
        wanted = part(**{name: (came[name], stop)})
        if stop <= form.nbytes:
            do(transfers, wanted)
            came[name] = stop
        else:
            with pytest.raises(InvalidRequestError, match=f"'{name}' ends at byte {stop}"):
                do(transfers, wanted)
    if all(came[name] == form.nbytes for name, form in FORMS.items()):
        do(transfers, COMMIT)
        assert transfers.open is None
    else:
        with pytest.raises(ConflictError, match="transfer 't' is not complete"):
            do(transfers, COMMIT)
        assert transfers.open is not None  # the rest can still come


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (part(w=(4, 8)), "'w' begins at byte 4, and the next one to come begins at 0"),
        (part(w=(0, 3)), "'w' ends at byte 3; the tensor has 24, 4 an element"),
        (part(b=(0, 12)), "'b' ends at byte 12; the tensor has 10, 2 an element"),
        (part(empty=(0, 4)), "'empty' ends at byte 4; the tensor has 0"),
        (part(ww=(0, 4)), "has no tensor 'ww'; did you mean 'w'"),
    ],
)
def test_a_piece_that_does_not_fit_is_refused_by_its_tensor(wrong, words):
    transfers = Transfers()
    do(transfers, opening())
    with pytest.raises(InvalidRequestError, match=words):
        do(transfers, wrong)
    do(transfers, WHOLE)  # what was refused has changed nothing
    do(transfers, COMMIT)


def test_nothing_of_a_part_counts_where_one_of_its_pieces_is_refused():
    transfers = Transfers()
    do(transfers, opening())
    with pytest.raises(InvalidRequestError, match="'b' begins at byte 2"):
        do(transfers, part(w=(0, 24), b=(2, 10)))
    do(transfers, WHOLE)


@pytest.mark.parametrize(
    "other", [Sync(), TENSORS, Reset(), opening("u")], ids=lambda each: type(each).__name__
)
def test_another_delivery_ends_a_transfer(other):
    transfers = Transfers()
    do(transfers, opening())
    do(transfers, WHOLE)
    do(transfers, other)
    with pytest.raises(ConflictError, match=r"push refused: .* no open transfer 't'"):
        do(transfers, COMMIT)
    with pytest.raises(ConflictError, match=r"push_part refused: .* no open transfer 't'"):
        do(transfers, part(w=(0, 4)))


def test_nothing_else_does():
    transfers = Transfers()
    do(transfers, opening())
    do(transfers, Request())
    do(transfers, WHOLE)
    do(transfers, COMMIT)


@pytest.mark.parametrize("asked", [WHOLE, COMMIT], ids=["part", "commit"])
def test_a_transfer_is_its_clients_own(asked):
    transfers = Transfers()
    do(transfers, opening(), client="a")
    with pytest.raises(ConflictError, match="this client has no open transfer 't'"):
        do(transfers, asked, client="b")
    do(transfers, WHOLE, client="a")
    do(transfers, COMMIT, client="a")


def test_a_transfer_may_begin_anew_under_its_name():
    transfers = Transfers()
    do(transfers, opening())
    do(transfers, part(w=(0, 4)))
    do(transfers, opening())
    do(transfers, WHOLE)
    do(transfers, COMMIT)


# -- by messages --------------------------------------------------------------------------------


@in_loop
async def test_parts_and_their_push_execute_by_number_whatever_the_arrival():
    requests = [opening(), part(w=(0, 12)), part(w=(12, 24), b=(0, 10))]
    async with running(backend=Pushed()) as talk:
        await talk.submit("push", 4, COMMIT)
        for number in (3, 2, 3, 2):
            await talk.submit("push_part", number, requests[number - 1])
        assert talk.backend.calls == []
        await talk.submit("push_part", 1, requests[0])
        receipt = await talk.result("push", 4, COMMIT)
        assert talk.backend.parts == requests
        assert receipt.version == 1
        for number in (1, 2, 3):  # said again, each is answered and not done again
            assert (await talk.result("push_part", number, requests[number - 1])).version == 0
        assert talk.backend.calls == ["push_part"] * 3 + ["push"]


@in_loop
async def test_an_incomplete_transfer_is_not_pushed_and_can_be_completed():
    async with running(backend=Pushed()) as talk:
        await talk.result("push_part", 1, opening())
        await talk.result("push_part", 2, part(w=(0, 24)))
        error = await talk.error("push", 3, COMMIT)
        assert isinstance(error, ConflictError)
        assert "of tensor 'b' 0 bytes have come, of 10" in error.message
        assert error.details == {"transfer": "t", "tensor": "b"}
        await talk.result("push_part", 4, part(b=(0, 10)))
        assert (await talk.result("push", 5, COMMIT)).version == 1
        assert talk.backend.calls.count("push") == 1


@in_loop
async def test_a_part_that_fails_ends_its_transfer_and_spoils_nothing():
    async with running(backend=Pushed()) as talk:
        await talk.result("forward_backward", 1, FORWARD_BACKWARD)
        await talk.result("push_part", 2, opening())
        talk.backend.failures["push_part"] = BackendError("no room")
        assert (await talk.error("push_part", 3, part(w=(0, 24)))).message == "no room"
        for number, request in ((4, part(b=(0, 10))), (5, part(w=(0, 24)))):
            error = await talk.error("push_part", number, request)
            assert isinstance(error, ConflictError)
        assert isinstance(await talk.error("push", 6, COMMIT), ConflictError)
        assert (await talk.result("optim_step", 7, OPTIM_STEP)).version == 1


@in_loop
async def test_a_part_that_was_cancelled_is_missing():
    async with running(backend=Pushed()) as talk:
        assert await talk.cancel("push_part", 2)
        await talk.result("push_part", 1, opening())
        assert isinstance(await talk.error("push_part", 2, part(w=(0, 4))), OperationCancelled)
        error = await talk.error("push_part", 3, part(w=(4, 24)))
        assert "begins at byte 4, and the next one to come begins at 0" in error.message
        assert isinstance(await talk.error("push", 4, COMMIT), ConflictError)


@in_loop
async def test_a_push_that_fails_in_the_backend_ends_its_transfer():
    async with running(backend=Pushed()) as talk:
        await talk.result("push_part", 1, opening())
        await talk.result("push_part", 2, WHOLE)
        talk.backend.failures["push"] = BackendError("an engine died")
        assert (await talk.error("push", 3, COMMIT)).message == "an engine died"
        assert "no open transfer" in (await talk.error("push", 4, COMMIT)).message


@in_loop
async def test_a_push_that_the_rules_refuse_leaves_its_transfer_and_the_run_pristine():
    async with running(backend=Pushed()) as talk:
        await talk.result("push_part", 1, opening())
        assert isinstance(await talk.error("push", 2, COMMIT), ConflictError)
        await talk.result("push_part", 3, WHOLE)
        await talk.result("pause", 1)
        error = await talk.error("push", 4, Push(transfer="t", in_flight="wait"))
        assert "generation is paused; resume first" in error.message
        assert talk.dispatcher.rules.pristine
        await talk.result("resume", 2)
        await talk.result("push", 5, Push(transfer="t", in_flight="wait"))
        assert not talk.dispatcher.rules.pristine


@in_loop
async def test_a_transfer_ends_with_its_clients_lease():
    async with running(backend=Pushed()) as talk:
        await talk.result("push_part", 1, opening())
        await talk.result("push_part", 2, WHOLE)
        await talk.detach()
        await talk.grant("b", start="current")
        error = await talk.error("push", 1, COMMIT, client="b")
        assert isinstance(error, ConflictError)
        await talk.result("push_part", 2, opening(), client="b")
        await talk.result("push_part", 3, WHOLE, client="b")
        assert (await talk.result("push", 4, COMMIT, client="b")).version == 1


@in_loop
async def test_steps_of_training_between_the_parts_leave_them_alone():
    async with running(backend=Pushed()) as talk:
        await talk.result("push_part", 1, opening())
        await talk.step(2)
        await talk.result("push_part", 4, WHOLE)
        await talk.result("zero_grad", 5)
        receipt = await talk.result("push", 6, COMMIT)
        assert receipt.version == 2  # above that of the step
