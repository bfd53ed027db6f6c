"""Arctic backend: the group in which the trainer's rank 0 broadcasts weights to all sampler workers
(imports torch, errors and sources; vllm for NCCL).

All of it is the same for gloo, which is tested on CPUs, and NCCL, whose three calls (to join, to
broadcast, to abort) are UNVERIFIED: the group meets at a store that rank 0 opens, and each tensor
goes in pieces, so that whoever watches sees something move. No wait is without an end: a side that
is gone is noticed by its connections or at the store, one that hangs by a piece that did not move
for `patience` seconds, and whoever is told that the delivery is called off leaves at once.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import BroadcastOptions
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from remote_rl.errors import BackendError, RemoteRLError, describe

from .sources import Meeting

#: of a tensor, in one broadcast: what shows that something moves
PIECE_BYTES = 64 << 20
#: how soon whoever waits notices that the delivery is called off
LOOK_SECONDS = 0.05
#: how often who waits asks the store whether somebody has left
STORE_SECONDS = 1.0
#: set in the store by who leaves
_BROKEN_OFF = "broken off"
#: how often an NCCL broadcast is asked whether it is over; there is no wait that could be ended
_ASK_SECONDS = 0.0002


def open_store(patience: float) -> TCPStore:
    """Where the others of a group find rank 0; its port is free and its own."""
    return TCPStore(
        "localhost",
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=patience),
    )


def join(
    meeting: Meeting,
    rank: int,
    store: TCPStore | None = None,
    called_off: Callable[[], bool] = lambda: False,
) -> Group:
    """This process's end of the group, once all are there. store: that of rank 0, which opened it.
    called_off: whether nobody needs it any more. Raises `BackendError` where not all of them come
    within the meeting's patience."""
    made: Future[Group] = Future()
    # which one that is, only this thread knows
    device = torch.accelerator.current_device_index() if meeting.kind == "nccl" else None
    # NCCL would wait for ever for one that dies while they connect; nobody waits for this thread
    threading.Thread(
        target=_join_aside,
        args=(made, meeting, rank, device, store, called_off),
        name=f"joins {meeting.name}",
        daemon=True,
    ).start()
    end = time.monotonic() + 2 * meeting.patience
    try:
        while not wait([made], LOOK_SECONDS).done:
            _go_on(called_off)
            if time.monotonic() > end:
                raise _lost(meeting, "its meeting", "not all connected")
        return made.result()
    except RemoteRLError:
        made.add_done_callback(_leave)  # where it comes to be after all
        raise
    except Exception as error:
        raise _lost(meeting, "its meeting", describe(error)) from error
    finally:
        # its error's traceback holds this frame, and both would keep the store and its port
        del made


def _join_aside(made: Future[Group], *given: Any) -> None:
    try:
        made.set_result(_joined(*given))
    except Exception as error:  # noqa: BLE001 - whoever waits hears it
        # without its frames, which hold the store for as long as anybody holds the error
        made.set_exception(error.with_traceback(None))


def _leave(made: Future[Group]) -> None:
    if made.exception() is None:
        made.result().abort()


def _joined(
    meeting: Meeting,
    rank: int,
    device: int | None,
    store: TCPStore | None,
    called_off: Callable[[], bool],
) -> Group:
    patience = timedelta(seconds=meeting.patience)
    found = store or TCPStore(
        meeting.address, meeting.port, is_master=False, wait_for_workers=False, timeout=patience
    )
    mine = PrefixStore(meeting.name, found)
    mine.set(f"here {rank}", "")
    try:
        _await_all(meeting, mine, called_off)
        if device is not None:
            return NcclGroup(meeting, rank, torch.device("cuda", device), mine, called_off)
        return GlooGroup(meeting, rank, mine, called_off)
    except Exception:
        with contextlib.suppress(RuntimeError):  # rank 0 can be gone, which tells them too
            mine.set(_BROKEN_OFF, "")
        raise


def _await_all(meeting: Meeting, store: PrefixStore, called_off: Callable[[], bool]) -> None:
    everybody = [f"here {each}" for each in range(meeting.size)]
    end = time.monotonic() + meeting.patience
    while not store.check(everybody):
        _go_on(lambda: called_off() or store.check([_BROKEN_OFF]))
        if time.monotonic() > end:
            missing = [number for number, key in enumerate(everybody) if not store.check([key])]
            raise BackendError(
                f"{len(missing)} of the {meeting.size} processes of the broadcast did not come "
                f"within {meeting.patience:g} s, number {missing[0]} among them (0 is the trainer, "
                "the engines' workers follow); sync again",
                group=True,
            )
        time.sleep(LOOK_SECONDS)


class Group:
    """One process's end of a group. moved: pieces that have gone through it, a sign of life.
    device: of the tensors that it takes."""

    device = torch.device("cpu")

    def __init__(
        self, meeting: Meeting, store: PrefixStore, called_off: Callable[[], bool]
    ) -> None:
        self.meeting = meeting
        self.moved = 0
        self._store: PrefixStore | None = store
        self._looked = time.monotonic()
        self._called_off = called_off
        self._leaving = threading.Lock()

    def carry(self, tensor: torch.Tensor) -> None:
        """Rank 0's tensor, contiguous and on `device`, into those of the others; all call it with
        the same shapes in the same order. Raises `BackendError` where the group is lost, called
        off, or nothing moves."""
        numbers = tensor.reshape(-1).view(torch.uint8)
        for begin in range(0, len(numbers), PIECE_BYTES):
            try:
                self.go_on()  # what was left can't be used any more, whoever left it
                self._piece(numbers[begin : begin + PIECE_BYTES])
            except RemoteRLError:
                raise
            except Exception as error:
                raise _lost(self.meeting, "a piece of the weights", describe(error)) from error
            self.moved += 1

    def go_on(self) -> None:
        """Raises `BackendError` where the delivery is called off, this process has left, or, looked
        at every second, somebody else has; of what waits on a device, its connections tell
        nobody."""
        _go_on(self._called_off)
        now, store = time.monotonic(), self._store
        if store is None:
            raise _lost(self.meeting, "a piece of the weights", "this process has left it")
        if now - self._looked > STORE_SECONDS:
            self._looked = now
            _go_on(lambda: store.check([_BROKEN_OFF]))

    def abort(self) -> None:
        """Leaves; what waits in it fails. From any thread, and more than once. Returns at once:
        what it takes is done by threads, and each step of it can wait for one that hangs."""
        with self._leaving:
            store, self._store = self._store, None
        if store is not None:
            _aside(store.set, _BROKEN_OFF, "")
            _aside(self._close)

    def _piece(self, piece: torch.Tensor) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError


class GlooGroup(Group):
    """Over TCP. Who leaves closes its connections, so that the others hear of it at once; where a
    broadcast is under way that does not move, gloo waits with that until it has given it up."""

    def __init__(
        self, meeting: Meeting, rank: int, store: PrefixStore, called_off: Callable[[], bool]
    ) -> None:
        super().__init__(meeting, store, called_off)
        options = ProcessGroupGloo._Options()
        address = _facing(meeting.address, meeting.port)
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=meeting.patience)
        self._held: list[Any] = [ProcessGroupGloo(store, rank, meeting.size, options)]
        self._order = BroadcastOptions()
        self._order.rootRank = self._order.rootTensor = 0
        #: whoever lets go of gloo last waits with it, which is to be the thread that leaves
        self._using = threading.Lock()

    def _piece(self, piece: torch.Tensor) -> None:
        with self._using:
            work = self._held[0].broadcast([piece], self._order)
            try:
                while not work.is_completed():
                    self.go_on()
                    with contextlib.suppress(RuntimeError):  # not yet; or it failed, told below
                        work.wait(timedelta(seconds=LOOK_SECONDS))
                work.wait()
            finally:
                # it holds the connections, and an error's traceback would hold it
                del work

    def _close(self) -> None:
        with self._using:  # soon: `go_on` says that this process has left
            self._held.clear()


class NcclGroup(Group):
    """UNVERIFIED. By vLLM's own communicator, which its weight transfer uses too."""

    def __init__(
        self,
        meeting: Meeting,
        rank: int,
        device: torch.device,
        store: PrefixStore,
        called_off: Callable[[], bool],
    ) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup
        from vllm.utils.nccl import unpinned_nccl_env

        super().__init__(meeting, store, called_off)
        self.device = device
        place = StatelessProcessGroup(rank=rank, world_size=meeting.size, store=store)
        with unpinned_nccl_env():  # what vLLM sets for its own communicators, rank 0 has not
            self._communicator: Any = PyNcclCommunicator(place, device)
        if not self._communicator.available:
            raise BackendError("vLLM found no NCCL library here; use weights.path 'gloo'")

    def _piece(self, piece: torch.Tensor) -> None:
        stream = torch.cuda.current_stream(self.device)
        begun, patience = time.monotonic(), self.meeting.patience
        self._communicator.broadcast(piece, src=0, stream=stream)
        done = torch.cuda.Event()
        done.record(stream)
        while not done.query():
            self.go_on()
            if time.monotonic() - begun > patience:
                why = f"nothing moved for {patience:g} s"
                raise _lost(self.meeting, "a piece of the weights", why)
            time.sleep(_ASK_SECONDS)
        self.go_on()  # what was aborted ends as if it had gone well

    def _close(self) -> None:
        self._communicator.destroy()  # ncclCommAbort: kernels that wait on the device end


def _go_on(called_off: Callable[[], bool]) -> None:
    if called_off():
        raise BackendError("the delivery was called off", group=True)


def _aside(work: Callable[..., Any], *arguments: Any) -> None:
    """On a thread that nobody waits for."""

    def run() -> None:
        with contextlib.suppress(RuntimeError):  # what is left can be gone already
            work(*arguments)

    threading.Thread(target=run, name="leaves a group", daemon=True).start()


def _lost(meeting: Meeting, what: str, why: str) -> BackendError:
    return BackendError(
        f"the broadcast of weights over {meeting.kind} was broken off in {what} ({why}); sync "
        "again, which makes a new group",
        group=True,
    )


def _facing(address: str, port: int) -> str:
    """This machine's address on its way to another."""
    family, kind, protocol, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)  # of a datagram socket: nothing is sent
        return str(probe.getsockname()[0])
