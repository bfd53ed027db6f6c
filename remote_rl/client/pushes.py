"""Client: a push that is too large for one message, in parts (imports the contract, faces).

The numbers of all its parts and of the push are taken at the call, so that whatever is called next
comes after them; what is sent is cut and encoded as its turn comes, a few parts at a time.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from ..errors import InvalidRequestError, OperationCancelled
from ..messages import ProgressReport
from ..requests import Push, PushPart, Request
from ..types.arrays import Array
from ..types.pieces import Piece, TensorForm
from ..types.results import SyncReceipt, Tensor
from .faces import check_deadline, time_left
from .operation import Call, Operation, as_it_is

if TYPE_CHECKING:
    from .connection import Connection
    from .weights import Weights

#: bytes of tensors in one message, at most
PART_BYTES = 64 << 20
#: parts that may be on their way or in the run at once
AT_ONCE = 2

#: a tensor's name, and the bytes of it at which a piece begins and ends
Stretch = tuple[str, int, int]


@attrs.frozen(eq=False)
class Plan:
    """What is to be sent, and how it is cut. tensors: by name; one of torch is brought to the host
    when its first piece is sent. forms: of each. parts: pieces of each part."""

    tensors: Mapping[str, Any]
    forms: Mapping[str, TensorForm]
    parts: tuple[tuple[Stretch, ...], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(form.nbytes for form in self.forms.values())

    def requests(self, transfer: str, model: str) -> Iterator[PushPart]:
        """Each part as it is asked for; its pieces are views of the tensors' memory."""
        held, data = None, np.empty(0, np.uint8)
        for part in self.parts:
            pieces = {}
            for name, start, stop in part:
                if name != held:
                    held, data = name, _bytes_of(self.tensors[name])
                pieces[name] = Piece(offset=start, data=data[start:stop])
            yield PushPart(transfer=transfer, pieces=pieces, model=model)


def plan_of(face: Weights, tensors: Any, part_bytes: int | None) -> Plan | None:
    """How these tensors are sent; None: in one message, because they are small, are none, or the
    backend takes no parts and the caller has not asked for them."""
    limit = PART_BYTES if part_bytes is None else part_bytes
    if type(limit) is not int or limit < 1:
        raise InvalidRequestError(
            f"part_bytes must be a whole number of bytes above 0, not {part_bytes!r}",
            field="part_bytes",
        )
    offered = face._connection.grant.info.capabilities.operations
    if not isinstance(tensors, Mapping) or (part_bytes is None and "push_part" not in offered):
        return None
    held = {str(name): _held(value) for name, value in tensors.items()}
    forms = {name: _form(value) for name, value in held.items()}
    if sum(form.nbytes for form in forms.values()) <= limit:
        return None
    return Plan(held, forms, cut(forms, limit))


def cut(forms: Mapping[str, TensorForm], part_bytes: int) -> tuple[tuple[Stretch, ...], ...]:
    """The pieces of each part: all bytes of all tensors once, in their order, whole elements, and
    no more than `part_bytes` in a part (or one element, where that is larger)."""
    parts: list[tuple[Stretch, ...]] = []
    part: list[Stretch] = []
    room = part_bytes
    for name, form in forms.items():
        start, end, item = 0, form.nbytes, form.itemsize
        while start < end:
            size = min(end - start, room // item * item)
            if size == 0:
                if part:
                    parts.append(tuple(part))
                    part, room = [], part_bytes
                    continue
                size = item
            part.append((name, start, start + size))
            start, room = start + size, max(0, room - size)
    return (*parts, tuple(part)) if part else tuple(parts)


def submit_parts(
    face: Weights, plan: Plan, push: Push, deadline: float | None
) -> Operation[SyncReceipt]:
    """Sends the forms, then the parts, then `push`, which names their transfer. deadline: for all
    of it together, from now."""
    connection = face._connection
    connection.refuse_in_custom_loss("push")
    check_deadline(deadline)
    assert push.transfer is not None
    opening = PushPart(transfer=push.transfer, forms=plan.forms, model=push.model)
    face._check("push_part", opening)
    face._check("push", push)
    connection.check_process()
    connection.worker.ready()
    connection.transport.digest(opening)  # raises where it can't cross, before a number is taken
    with connection.ordering:
        calls = [connection.reserve("push_part", as_it_is) for _ in range(1 + len(plan.parts))]
        sending = _Sending(connection, plan, push, calls, deadline)
        # in the lock: jobs wait for operations before them, so they stand in the order of those
        connection.worker.submit(lambda: sending.run(opening))
    return Operation(sending.commit)


class _Sending:
    """One push on its way. commit: the call of the push itself. unsent: those of the parts that
    have not been sent, in order. under_way: those that have and are not known to have ended, with
    the bytes of each."""

    def __init__(
        self,
        connection: Connection,
        plan: Plan,
        push: Push,
        calls: list[Call],
        deadline: float | None,
    ) -> None:
        self._begin = time.monotonic()
        self._connection = connection
        self._plan = plan
        self._push = push
        self._deadline = deadline
        self._bytes_done, self._bytes = 0, plan.nbytes
        for call in calls:
            call.observed = True  # its failure is told as the push's own
        self.unsent = deque(calls)
        self.under_way: deque[tuple[Call, int]] = deque()
        self.commit = connection.reserve("push", as_it_is)

    def run(self, opening: PushPart) -> None:
        """The job. What fails on the way fails the push, which is not sent then, and the numbers
        that are left are filled, so that nothing waits for them."""
        transfer, model = opening.transfer, opening.model
        try:
            self._send_part(opening)
            self._await_one()  # whether they are the model's tensors, before any of them is sent
            for part in self._plan.requests(transfer, model):
                if len(self.under_way) == AT_ONCE:
                    self._await_one()
                self._send_part(part)
            while self.under_way:
                self._await_one()
            self._send(self.commit, self._push)
        except BaseException as error:  # noqa: BLE001 - whatever it was is the push's outcome
            self._connection.withdraw([self.commit, *self.unsent], error)

    def _send_part(self, part: PushPart) -> None:
        self._send(self.unsent[0], part)
        size = sum(piece.data.nbytes for piece in part.pieces.values())
        self.under_way.append((self.unsent.popleft(), size))

    def _send(self, call: Call, request: Request) -> None:
        if self.commit.cancel_asked or self.commit.done:
            raise OperationCancelled("push was cancelled before it started")
        digest = self._connection.transport.digest(request)
        left = time_left(self._deadline, self._begin, "the tensors of a push were sent")
        self._connection.send(call, request, digest, left)

    def _await_one(self) -> None:
        call, size = self.under_way.popleft()
        call.own_outcome()
        self._bytes_done += size
        stream, number = self.commit.key
        self.commit.progress = ProgressReport(
            stream=stream,
            number=number,
            done=self._bytes_done,
            total=self._bytes,
            what="sending bytes",
        )


def new_transfer() -> str:
    """A name that no other push has."""
    return secrets.token_hex(8)


def _held(value: Any) -> Any:
    """A tensor of torch as it is, wherever it lies; all else as a `Tensor`."""
    return value if hasattr(value, "detach") else Tensor.of(value)


def _form(value: Any) -> TensorForm:
    if isinstance(value, Tensor):
        return TensorForm.of(value)
    return TensorForm(shape=tuple(value.shape), dtype=str(value.dtype).removeprefix("torch."))


def _bytes_of(value: Any) -> Array:
    """[bytes] uint8, a view where the memory allows."""
    flat: Array = np.ascontiguousarray(Tensor.of(value).data).reshape(-1)
    return flat.view(np.uint8)
