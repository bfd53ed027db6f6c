"""Testing: messages below a session's faces: unchecked, sent twice, out of order (imports pytest,
the contract and the client).

A session never says the same thing twice on purpose, nor what the backend does not offer. Whether
the other side would hold is asked here.
"""

from __future__ import annotations

from typing import Any

import pytest

from ...client import Operation, Session
from ...client.operation import Call
from ...errors import OperationCancelled
from ...messages import Busy, Cancel, Cancelled, Outcome, Submit
from ...requests import Request

#: seconds that an answer may wait for the result, a message for room, and a transport may take
LINGER, PATIENCE, TRANSPORT = 30.0, 30.0, 600.0


class Messages:
    """Numbers and messages of a session's own stream, by hand."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._connection = session._connection
        self._open: list[Call] = []

    def unchecked(self, operation: str, request: Request) -> Operation[Any]:
        """An operation that the client does not look at before it is sent."""
        connection = self._connection
        with connection.ordering:
            call = connection.reserve(operation, lambda response: response)
            connection.send(call, request, connection.transport.digest(request))
        return Operation(call)

    def reserve(self, operation: str) -> Call:
        """The next number of the operation's stream, for `submit` or `cancel`."""
        call = self._connection.reserve(operation, lambda response: response)
        self._open.append(call)
        return call

    def submit(self, call: Call, request: Request, linger: float = LINGER) -> Outcome:
        """Says the operation under its number, as often as it is called; the answer as it is,
        done where the result came within `linger` seconds."""
        digest = self._connection.transport.digest(request) or f"by hand {id(request)}"
        message = Submit(
            client_id=self._connection.client_id,
            instance_id=self._connection.grant.instance_id,
            operation=call.row.name,
            number=call.number,
            request=request,
            digest=digest,
            generates_before=call.generates_before,
            linger=linger,
            patience=PATIENCE,
        )
        answer: Outcome | Busy = self._say(message)
        if isinstance(answer, Busy):
            pytest.fail(f"the run had no room for a small {call.row.name}: {answer}")
        return answer

    def outcome(self, call: Call, request: Request) -> Any:
        """The result of the operation, said until it is done; raises its failure."""
        outcome = self.submit(call, request)
        while not outcome.done:
            outcome = self.submit(call, request)
        if outcome.error is not None:
            raise outcome.error
        return outcome.result

    def cancel(self, call: Call) -> Cancelled:
        """Asks that the number never run."""
        cancelled: Cancelled = self._say(
            Cancel(
                client_id=self._connection.client_id,
                instance_id=self._connection.grant.instance_id,
                stream=call.row.stream.value,
                number=call.number,
                operation=call.row.name,
            )
        )
        return cancelled

    def acknowledge(self, call: Call) -> None:
        """The next message of the session says that this outcome has arrived; says one."""
        self._close(call)
        self._session.info().result()

    def end(self) -> None:
        """Fills the numbers that were reserved and not sent, so that nothing waits for them."""
        for call in list(self._open):
            self.cancel(call)
            self._close(call)

    def _close(self, call: Call) -> None:
        self._open.remove(call)
        call.cancel_asked = True  # its failure is the test's to judge
        self._connection._link.acknowledge(call.key)
        self._connection._finish(call, error=OperationCancelled("it was said by hand"))

    def _say(self, message: Any) -> Any:
        return self._session._loop.run(self._connection.transport.call(message, TRANSPORT))
