"""Contract: what a client and a dispatcher say to each other (imports errors, types, requests and
run_info).

A transport carries one of these to the dispatcher and brings one reply back. Every message may be
sent again: nothing here is executed twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import attrs
import numpy as np

from .errors import RemoteRLError
from .requests import Request
from .run_info import RunInfo
from .types import fields
from .types.fields import (
    as_tuple,
    each,
    flag,
    instance_of,
    integer,
    optional,
    plain,
    strict,
    text,
)
from .types.generation import Generation

#: (stream, number) of an operation of the client that asks
Key = tuple[str, int]


def _keys(data: Any) -> Any:
    return tuple(tuple(item) for item in data)


@strict
@attrs.frozen(kw_only=True)
class Message:
    """Base of what a client sends."""


@strict
@attrs.frozen(kw_only=True)
class Describe(Message):
    """Asks for `RunInfo`, without a lease."""


@strict
@attrs.frozen(kw_only=True)
class Observe(Message):
    """Asks for `RunStatus`, without a lease."""


@strict
@attrs.frozen(kw_only=True)
class Attach(Message):
    """Asks for a lease: as driver, or as a member of the driver's epoch that a handle names.

    client_id: unique to the process. protocol_versions: what the client speaks.
    model: refused where it differs from the run's. start: "base", "current", a checkpoint, None.
    instance_id, epoch: the handle's; None asks to be the driver. takeover: revoke another driver.
    """

    client_id: str = attrs.field(validator=text())
    protocol_versions: tuple[int, ...] = attrs.field(
        converter=as_tuple, validator=each(integer(minimum=1))
    )
    model: str | None = attrs.field(default=None, validator=optional(text()))
    start: str | None = attrs.field(default=None, validator=optional(text()))
    instance_id: str | None = attrs.field(default=None, validator=optional(text()))
    epoch: int | None = attrs.field(default=None, validator=optional(integer(minimum=1)))
    takeover: bool = attrs.field(default=False, validator=flag())


@strict
@attrs.frozen(kw_only=True)
class Grant:
    """A lease. role: "driver" or "member". lease_seconds: how long it lasts without a message.
    needs_start: what the client must do first ("base", "current", a checkpoint's name), or None."""

    client_id: str
    instance_id: str
    epoch: int = attrs.field(converter=plain)
    role: str
    lease_seconds: float = attrs.field(converter=float)
    needs_start: str | None = None
    info: RunInfo


@strict
@attrs.frozen(kw_only=True)
class Occupied:
    """Another driver holds the run. remaining: seconds until its lease ends if nothing is heard
    of it. renewals: grows with every sign of life, so that a waiting client can tell."""

    remaining: float = attrs.field(converter=float)
    renewals: int = attrs.field(converter=plain)


@strict
@attrs.frozen(kw_only=True)
class Leased(Message):
    """Base of the messages that need a lease; each renews it.

    acknowledged: operations whose outcome the client holds, so that the run may forget it.
    """

    client_id: str = attrs.field(validator=text())
    instance_id: str = attrs.field(validator=text())
    acknowledged: tuple[Key, ...] = attrs.field(default=(), converter=_keys)


@strict
@attrs.frozen(kw_only=True)
class Renew(Leased):
    """A sign of life."""


@strict
@attrs.frozen(kw_only=True)
class Renewed:
    """lease_seconds: how long the lease lasts from now."""

    lease_seconds: float = attrs.field(converter=float)


class PendingDigest:
    """Base of a digest that may be complete only once the request's bytes have been sent."""


Digest: TypeAlias = str | PendingDigest


def _text_or_pending(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, PendingDigest):
        text()(instance, attribute, value)


def _digest(value: Any) -> Any:
    """What was sent as bytes, perhaps after the request's, as hex digits."""
    if isinstance(value, np.ndarray) and value.dtype == np.uint8 and 1 <= value.size <= 64:
        return value.tobytes().hex()
    return value


@strict
@attrs.frozen(kw_only=True)
class Submit(Leased):
    """One operation.

    operation: a name of the table. number: its place in the client's stream, from 1.
    request: the table's request class. digest: of the request, None where nothing is resent.
    generates_before: how many generates the client had called before it; what a checkpoint holds
    of their seeds, however late it is written.
    deadline: seconds from its acceptance, or None. linger: how long the answer may wait for the
    result, in seconds. patience: how long it may wait for room, before it is `Busy`, in seconds.
    """

    operation: str = attrs.field(validator=text())
    number: int = attrs.field(validator=integer(minimum=1, maximum=2**53))
    request: Request = attrs.field(validator=instance_of(Request))
    digest: Digest | None = attrs.field(
        default=None, converter=_digest, validator=optional(_text_or_pending)
    )
    generates_before: int = attrs.field(default=0, validator=integer(minimum=0))
    deadline: float | None = attrs.field(default=None, validator=optional(fields.number(above=0)))
    linger: float = attrs.field(default=0.0, validator=fields.number(minimum=0, maximum=60))
    patience: float = attrs.field(default=0.0, validator=fields.number(minimum=0, maximum=60))


@strict
@attrs.frozen(kw_only=True)
class Outcome:
    """Where an operation stands: `result` or `error` where `done`, neither before."""

    stream: str
    number: int = attrs.field(converter=plain)
    done: bool
    result: Any = None
    error: RemoteRLError | None = None


@strict
@attrs.frozen(kw_only=True)
class Busy:
    """The answer to a `Submit` that was not accepted, since too much is kept for the client: its
    requests that have not ended and its results that it has not acknowledged. The number is free;
    submit again once something has ended and is acknowledged, or after `retry_after` seconds.

    kept, budget: bytes of arrays.
    """

    kept: int = attrs.field(converter=plain)
    budget: int = attrs.field(converter=plain)
    retry_after: float = attrs.field(converter=float)


@strict
@attrs.frozen(kw_only=True)
class ProgressReport:
    """What a running operation last said of itself. stream, number: which operation. done, total:
    how far it is, total None where nobody knows. what: what it is doing."""

    stream: str
    number: int = attrs.field(converter=plain)
    done: float = attrs.field(converter=float)
    total: float | None = None
    what: str = ""


@strict
@attrs.frozen(kw_only=True)
class PartialSamples:
    """Samples of a running generate, those after the `start` that the client already holds."""

    number: int = attrs.field(converter=plain)
    start: int = attrs.field(converter=plain)
    samples: Generation


@strict
@attrs.frozen(kw_only=True)
class Wait(Leased):
    """Asks for whatever finished and isn't acknowledged, within `timeout` seconds.

    cursors: for generates that are being iterated, number (as text) to samples held.
    """

    timeout: float = attrs.field(validator=fields.number(minimum=0, maximum=600))
    cursors: Mapping[str, int] = attrs.field(factory=dict, validator=instance_of(Mapping))


@strict
@attrs.frozen(kw_only=True)
class Waited:
    """The answer to `Wait`, empty when nothing happened."""

    outcomes: tuple[Outcome, ...] = attrs.field(default=(), converter=as_tuple)
    progress: tuple[ProgressReport, ...] = attrs.field(default=(), converter=as_tuple)
    partials: tuple[PartialSamples, ...] = attrs.field(default=(), converter=as_tuple)


@strict
@attrs.frozen(kw_only=True)
class Cancel(Leased):
    """Asks that an operation not start, or, where it isn't sequenced, end early."""

    stream: str = attrs.field(validator=text())
    number: int = attrs.field(validator=integer(minimum=1, maximum=2**53))
    operation: str = attrs.field(validator=text())


@strict
@attrs.frozen(kw_only=True)
class Cancelled:
    """cancelled: it will never run, or was told to end early. False: it runs or has run."""

    cancelled: bool


@strict
@attrs.frozen(kw_only=True)
class Detach(Leased):
    """Gives the lease back; a driver's epoch ends with it, the run stays."""


@strict
@attrs.frozen(kw_only=True)
class Detached:
    """The lease is gone."""


MESSAGES: tuple[type, ...] = (
    Describe,
    Observe,
    Attach,
    Grant,
    Occupied,
    Renew,
    Renewed,
    Submit,
    Busy,
    Outcome,
    ProgressReport,
    PartialSamples,
    Wait,
    Waited,
    Cancel,
    Cancelled,
    Detach,
    Detached,
)


class ConnectionLost(Exception):
    """The transport can't say whether the message arrived; it may be sent again.

    refused: nothing listens at the address, so no process serves there any more. ended: nor will.
    """

    def __init__(self, message: str = "", *, refused: bool = False, ended: bool = False) -> None:
        super().__init__(message)
        self.refused = refused
        self.ended = ended


class Transport(Protocol):
    """The seam between client and dispatcher: one method.

    target: for messages and errors. submits: how many may be under way at once.
    """

    @property
    def target(self) -> str: ...
    @property
    def submits(self) -> int: ...

    async def call(self, message: Message, timeout: float) -> Any:
        """The dispatcher's reply. Raises the dispatcher's error, or `ConnectionLost` where none
        arrived within `timeout` seconds or the connection broke."""

    def digest(self, request: Request) -> Digest | None:
        """The request's digest, None where the transport never sends anything twice."""

    async def close(self) -> None: ...
