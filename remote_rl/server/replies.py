"""Server: replies as frames, also where one is too large for a frame (imports wire, messages,
errors)."""

from __future__ import annotations

from typing import Any

import attrs

from ..errors import BackendError, InvalidRequestError
from ..messages import Outcome, Waited
from ..wire import Frame, encode, header_bytes

#: of one answer to a wait, where all outcomes together don't fit: bytes of their JSON
_HEADER_BYTES = 8 << 20


def reply_frame(reply: Any) -> Frame:
    """The frame of a reply. An outcome that fits no frame fails alone, and of a wait's those that
    don't fit together come with the next one."""
    try:
        return encode(reply)
    except InvalidRequestError as error:
        if isinstance(reply, Outcome):
            return encode(_failed(reply, error))
        if isinstance(reply, Waited) and reply.outcomes:
            return encode(attrs.evolve(reply, outcomes=_fitting(reply.outcomes)))
        raise


def _fitting(outcomes: tuple[Outcome, ...]) -> tuple[Outcome, ...]:
    fitting: list[Outcome] = []
    size = 0
    for outcome in outcomes:
        try:
            frame = encode(outcome)
        except InvalidRequestError as error:
            outcome = _failed(outcome, error)
            frame = encode(outcome)
        size += header_bytes(frame.parts[0])
        if fitting and size > _HEADER_BYTES:
            break
        fitting.append(outcome)
    return tuple(fitting)


def _failed(outcome: Outcome, error: InvalidRequestError) -> Outcome:
    kind = "result" if outcome.error is None else f"{type(outcome.error).__name__} of it"
    told = BackendError(f"the operation has ended, but the {kind} can't cross the wire: {error}")
    return attrs.evolve(outcome, result=None, error=told)
