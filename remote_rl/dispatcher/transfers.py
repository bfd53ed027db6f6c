"""Dispatcher: pushes that come in parts, pure state (imports the contract).

At most one transfer is open in a run, so that a backend keeps one set of tensors aside at most. It
belongs to the client that began it. What ends it: the push that names it, another delivery of
weights (a sync, a whole push, a reset), another transfer, and a part that fails in the backend.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from ..errors import ConflictError, InvalidRequestError, nearest
from ..ops import Operation
from ..requests import Push, PushPart, Request
from ..types.pieces import Piece, TensorForm

#: operations after which the sampler holds other weights
_DELIVERIES = frozenset({"sync", "push", "reset"})


@attrs.define(eq=False)
class Transfer:
    """One that has begun. came: how many bytes of each tensor have."""

    client_id: str
    name: str
    forms: Mapping[str, TensorForm]
    came: dict[str, int] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.came = dict.fromkeys(self.forms, 0)

    def check(self, pieces: Mapping[str, Piece]) -> None:
        """Raises, by the tensor's name, unless each piece is the next of its tensor and lies within
        it."""
        for name, piece in pieces.items():
            form = self.forms.get(name)
            if form is None:
                raise InvalidRequestError(
                    f"push_part refused: transfer {self.name!r} has no tensor {name!r}; "
                    f"{nearest(name, self.forms)}",
                    field=name,
                )
            if piece.offset != self.came[name]:
                raise InvalidRequestError(
                    f"push_part refused: a piece of tensor {name!r} begins at byte {piece.offset}, "
                    f"and the next one to come begins at {self.came[name]}",
                    field=name,
                )
            if piece.end > form.nbytes or piece.end % form.itemsize:
                raise InvalidRequestError(
                    f"push_part refused: a piece of tensor {name!r} ends at byte {piece.end}; the "
                    f"tensor has {form.nbytes}, {form.itemsize} an element",
                    field=name,
                )

    def take(self, pieces: Mapping[str, Piece]) -> None:
        """These have come."""
        for name, piece in pieces.items():
            self.came[name] = piece.end

    def check_complete(self) -> None:
        """Raises where bytes are missing."""
        short = [name for name, form in self.forms.items() if self.came[name] < form.nbytes]
        if short:
            name = short[0]
            more = f" (and {len(short) - 1} more are short)" if len(short) > 1 else ""
            raise ConflictError(
                f"push refused: transfer {self.name!r} is not complete; of tensor {name!r} "
                f"{self.came[name]} bytes have come, of {self.forms[name].nbytes}{more}; send the "
                "rest, or all of them anew",
                transfer=self.name,
                tensor=name,
            )


class Transfers:
    """The transfer that is open, if any. While a part of it runs it is not: a failure ends it."""

    def __init__(self) -> None:
        self.open: Transfer | None = None

    def check(self, client_id: str, row: Operation, request: Request) -> Transfer | None:
        """Raises where an operation does not fit the open transfer. What is open once a part has
        succeeded, for `succeeded`."""
        if isinstance(request, PushPart):
            if request.forms:
                return Transfer(client_id, request.transfer, request.forms)
            held = self._named(client_id, row, request.transfer)
            held.check(request.pieces)
            return held
        if isinstance(request, Push) and request.transfer is not None:
            self._named(client_id, row, request.transfer).check_complete()
        return None

    def begin(self, row: Operation) -> None:
        """The operation is about to run."""
        if row.name in _DELIVERIES or row.name == "push_part":
            self.open = None

    def succeeded(self, part_of: Transfer | None, request: Request) -> None:
        """It has; `part_of` is what `check` returned."""
        if part_of is not None and isinstance(request, PushPart):
            part_of.take(request.pieces)
            self.open = part_of

    def _named(self, client_id: str, row: Operation, name: str) -> Transfer:
        held = self.open
        if held is None or (held.client_id, held.name) != (client_id, name):
            raise ConflictError(
                f"{row.name} refused: this client has no open transfer {name!r}; one ends with its "
                "push, another delivery of weights, another transfer, a part that failed, and its "
                "client's lease, so send the tensors anew",
                transfer=name,
            )
        return held
