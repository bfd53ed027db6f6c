"""The group of a broadcast, over gloo: threads of this process stand for ranks and workers where
nothing else is needed, and real ranks send to it, whatever their number and ZeRO stage."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import arctic_ranks
import attrs
import pytest
import torch
from arctic_oracle import random_batch, random_cotangents
from arctic_ranks import RankFailed
from arctic_training import STEADY, Trainer, same
from torch.distributed import PrefixStore

from backends.arctic.training.delivering import Deliveries
from backends.arctic.weights import broadcast
from backends.arctic.weights.broadcast import Group, join, open_store
from backends.arctic.weights.manifest import lay_out
from backends.arctic.weights.sources import Meeting
from remote_rl.errors import BackendError, InvalidRequestError

PATIENCE = 60.0
SOON = 5.0
#: of a broadcast that is to be given up
SHORT = 0.5


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


@attrs.define
class Place:
    """Where a group of `size` meets."""

    size: int
    patience: float = PATIENCE
    store: Any = attrs.field(init=False)
    meeting: Meeting = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.store = open_store(self.patience)
        self.meeting = Meeting(
            "gloo", "one", "localhost", self.store.port, self.size, self.patience
        )

    def end(self, rank: int, called_off: Callable[[], bool] = lambda: False) -> Group:
        return join(self.meeting, rank, self.store if rank == 0 else None, called_off)


def group_of(
    threads: ThreadPoolExecutor,
    size: int,
    called_off: Callable[[], bool] = lambda: False,
    patience: float = PATIENCE,
) -> list[Group]:
    place = Place(size, patience)
    joining = [threads.submit(place.end, rank, called_off) for rank in range(size)]
    return [each.result(PATIENCE) for each in joining]


def ends(work: Future[Any], message: str, within: float = SOON) -> None:
    """Asserts that it fails so, soon."""
    begin = time.monotonic()
    with pytest.raises(BackendError, match=message) as caught:
        work.result(PATIENCE)
    assert time.monotonic() - begin < within
    assert caught.value.details["group"] is True


# -- meeting ------------------------------------------------------------------------------------


def test_tensors_of_rank_0_come_to_all_in_pieces(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "PIECE_BYTES", 1000)
    group = group_of(threads, 4)
    draw = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(7, 90, generator=draw),
        torch.randn(3, 5, generator=draw).bfloat16(),
        torch.arange(4),
        torch.tensor(1.5),
        torch.empty(0, 3),
    ]

    def take(end: Group) -> list[torch.Tensor]:
        taken = [torch.zeros_like(each) for each in tensors]
        for each in taken:
            end.carry(each)
        return taken

    taking = [threads.submit(take, end) for end in group[1:]]
    for each in tensors:
        group[0].carry(each)
    for work in taking:
        assert all(torch.equal(*pair) for pair in zip(work.result(SOON), tensors, strict=True))
    assert {end.moved for end in group} == {3 + 1 + 1 + 1}
    for end in group:
        end.abort()


def test_who_does_not_come_is_not_waited_for_longer_than_patience(
    threads: ThreadPoolExecutor,
) -> None:
    place = Place(4, SHORT)
    for joining in [threads.submit(place.end, rank) for rank in (0, 2)]:
        ends(joining, r"2 of the 4 .* did not come within 0.5 s, number 1|called off")


@pytest.mark.parametrize("called_off", [False, True])
def test_a_meeting_that_fails_leaves_no_port(called_off: bool) -> None:
    """At once, and not when Python looks for what nobody holds."""
    gc.disable()
    try:
        store = open_store(SHORT)
        port = store.port
        meeting = Meeting("gloo", "one", "localhost", port, 3, SHORT)
        with pytest.raises(BackendError):
            join(meeting, 0, store, lambda: called_off)
        del store
        end = time.monotonic() + PATIENCE
        while listens(port):
            assert time.monotonic() < end
            time.sleep(0.01)
    finally:
        gc.enable()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0


def test_a_meeting_that_is_called_off_ends_for_all(threads: ThreadPoolExecutor) -> None:
    place, off = Place(3), threading.Event()
    joining = [threads.submit(place.end, 0, off.is_set), threads.submit(place.end, 1)]
    off.set()
    for each in joining:
        ends(each, "called off")


def test_a_store_that_goes_ends_the_meeting(threads: ThreadPoolExecutor) -> None:
    place = Place(3)
    joining = threads.submit(place.end, 1)
    until_here(place, 1)
    place.store = None  # as rank 0 dies
    ends(joining, "broken off in its meeting")


def until_here(place: Place, rank: int) -> None:
    end = time.monotonic() + PATIENCE
    while not place.store.check([f"one/here {rank}"]):
        assert time.monotonic() < end
        time.sleep(0.01)


# -- ends ---------------------------------------------------------------------------------------


def carry_on(end: Group) -> None:
    """As long as the group lasts; then it leaves too, as both sides do."""
    try:
        while True:
            end.carry(torch.zeros(9))
    finally:
        end.abort()


def test_who_leaves_is_missed_at_once(threads: ThreadPoolExecutor) -> None:
    for leaver in range(3):
        group = group_of(threads, 3)
        others = [end for end in group if end is not group[leaver]]
        lasting = [threads.submit(carry_on, end) for end in others]
        group[leaver].abort()
        for work in lasting:
            ends(work, "broken off in a piece")


def test_who_waits_for_one_that_does_not_take_is_called_off(threads: ThreadPoolExecutor) -> None:
    off = threading.Event()
    group = group_of(threads, 3, off.is_set)
    sending = threads.submit(group[0].carry, torch.zeros(9))
    taking = threads.submit(group[1].carry, torch.zeros(9))
    taking.exception(SOON)  # whether or not it got it
    off.set()
    ends(sending, "called off")
    for end in group:
        end.abort()


def test_who_is_called_off_as_a_piece_begins_does_not_wait_for_it(
    threads: ThreadPoolExecutor,
) -> None:
    """Whoever lets go of gloo last waits until it has given the piece up."""
    off = threading.Event()
    sender, other = group_of(threads, 2, off.is_set, patience=3 * SOON)

    class Begun:
        def __init__(self, held: Any) -> None:
            self._held = held

        def broadcast(self, *given: Any) -> Any:
            work = self._held.broadcast(*given)
            off.set()
            sender.abort()
            end = time.monotonic() + SHORT
            while sender._held and time.monotonic() < end:  # type: ignore[attr-defined]
                time.sleep(0.01)
            return work

    sender._held[:] = [Begun(sender._held[0])]  # type: ignore[attr-defined]
    ends(threads.submit(sender.carry, torch.zeros(9)), "called off")
    other.abort()


def test_who_waits_for_one_that_has_left_hears_it_at_the_store(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections don't tell all: of NCCL's none does, and gloo's not while rank 0 waits."""
    monkeypatch.setattr(broadcast.GlooGroup, "_close", lambda self: None)
    group = group_of(threads, 3)
    lasting = [threads.submit(carry_on, end) for end in group[:2]]
    group[2].abort()
    for work in lasting:
        ends(work, "called off|left it")


def test_what_does_not_move_is_given_up(threads: ThreadPoolExecutor) -> None:
    group = group_of(threads, 2, patience=SHORT)
    ends(threads.submit(group[0].carry, torch.zeros(9)), "broken off in a piece")
    ends(threads.submit(group[0].carry, torch.zeros(9)), "broken off in a piece")
    for end in group:
        end.abort()


def test_who_has_left_is_in_no_group(threads: ThreadPoolExecutor) -> None:
    group = group_of(threads, 2)
    for end in group:
        end.abort()
        end.abort()
    ends(threads.submit(group[0].carry, torch.zeros(9)), "broken off in a piece")


def test_what_was_left_is_not_used_any_more(threads: ThreadPoolExecutor) -> None:
    """Of NCCL's, what was aborted is gone, and would take no piece without saying so."""
    pieces: list[torch.Tensor] = []

    class Aborted(Group):
        def _piece(self, piece: torch.Tensor) -> None:
            pieces.append(piece)

        def _close(self) -> None: ...

    place = Place(2)
    end = Aborted(place.meeting, PrefixStore("one", place.store), lambda: False)
    end.carry(torch.zeros(9))
    end.abort()
    ends(threads.submit(end.carry, torch.zeros(9)), "this process has left it")
    assert len(pieces) == 1


# -- ranks --------------------------------------------------------------------------------------


class Receiver:
    """The other end of what ranks broadcast, in this process."""

    def __init__(self, trainer: Trainer, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._trainer = trainer
        forms = trainer.ranks.facts[0].forms
        self.forms = {name: (shape, "float32") for name, (shape, _) in forms.items()}
        self.group = self._joined()

    def _joined(self) -> Group:
        call = self._trainer.ranks.call
        port, *others = call("open_store", PATIENCE)
        assert set(others) <= {None}
        self.name = f"of {port}"
        meeting = Meeting("gloo", self.name, "localhost", port, 2, PATIENCE)
        joining = self._threads.submit(join, meeting, 1)
        assert set(call("join_group", meeting)) == {None}
        return joining.result(SOON)

    def again(self) -> None:
        self.group = self._joined()

    def take(self, count: int | None = None) -> Future[dict[str, torch.Tensor]]:
        """The next tensors; then it leaves, where they are not all."""

        def work() -> dict[str, torch.Tensor]:
            entries = lay_out(self.forms).entries[:count]
            taken = {each.name: torch.empty(each.shape) for each in entries}
            for each in taken.values():
                self.group.carry(each)
            if count is not None:
                self.group.abort()
            return taken

        return self._threads.submit(work)

    def send(self) -> list[Any]:
        return self._trainer.ranks.call("broadcast", self.name, self.forms)


@pytest.fixture
def trainer(ranks: Any) -> Trainer:
    return Trainer(ranks)


BATCH = random_batch(5)


def step(trainer: Trainer) -> dict[str, torch.Tensor]:
    trainer.forward_backward(BATCH, random_cotangents(BATCH))
    assert not trainer.step(STEADY).skipped
    return trainer.weights()


def test_ranks_broadcast_their_weights_and_outlive_who_leaves(
    trainer: Trainer, threads: ThreadPoolExecutor
) -> None:
    receiver = Receiver(trainer, threads)
    for _ in range(2):
        weights = step(trainer)
        taking = receiver.take()
        assert set(receiver.send()) == {None}
        assert same(taking.result(SOON), weights)
    leaving = receiver.take(3)
    failure, *others = receiver.send()
    assert isinstance(failure, BackendError)
    assert failure.details["group"] is True
    assert set(others) <= {None}
    assert len(leaving.result(SOON)) == 3
    assert isinstance(receiver.send()[0], BackendError)  # until there is a new group
    assert same(trainer.weights(), weights)
    receiver.again()
    weights = step(trainer)
    taking = receiver.take()
    assert set(receiver.send()) == {None}
    assert same(taking.result(SOON), weights)
    receiver.group.abort()


def test_ranks_that_wait_for_nobody_are_called_off(
    trainer: Trainer, threads: ThreadPoolExecutor
) -> None:
    weights = step(trainer)
    receiver = Receiver(trainer, threads)
    trainer.ranks.call(arctic_ranks.calls_off, receiver.name)
    begin = time.monotonic()
    failure, *_ = receiver.send()
    assert time.monotonic() - begin < SOON
    assert isinstance(failure, BackendError)
    assert "called off" in str(failure)
    assert same(trainer.weights(), weights)
    receiver.group.abort()


def test_what_was_called_off_is_forgotten_with_its_meeting() -> None:
    deliveries = Deliveries(0, torch.device("cpu"))
    for number in range(3):
        deliveries.call_off(f"meeting {number}")
        assert isinstance(deliveries.open_store(SHORT), int)
    assert not deliveries._called_off
    deliveries.leave()


def test_weights_that_are_not_finite_are_refused_before_anything_moves(trainer: Trainer) -> None:
    name = sorted(trainer.ranks.facts[0].forms)[-1]
    forms = {each: (shape, "float32") for each, (shape, _) in trainer.ranks.facts[0].forms.items()}
    trainer.ranks.call("check_weights", forms)
    trainer.ranks.call(arctic_ranks.spoil, name)
    with pytest.raises(RankFailed) as caught:
        trainer.ranks.call("check_weights", forms)
    assert isinstance(caught.value.error, InvalidRequestError)
    assert caught.value.error.details["field"] == name
    with pytest.raises(RankFailed, match="is missing"):
        trainer.ranks.call("check_weights", forms | {"other": ((1,), "float32")})
