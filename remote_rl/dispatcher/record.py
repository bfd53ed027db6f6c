"""Dispatcher: one accepted operation, from acceptance to acknowledgement (imports the contract)."""

from __future__ import annotations

import asyncio
import enum
from typing import Any

import attrs

from ..errors import RemoteRLError
from ..messages import Outcome, ProgressReport
from ..ops import Operation
from ..requests import Request
from ..types.generation import Sample


class State(enum.Enum):
    """HELD waits for an earlier number, QUEUED for its turn."""

    HELD = "held"
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"


@attrs.define(eq=False)
class Record:
    """What the dispatcher knows of one operation.

    client_id, ordinal: whose it is. key: (stream, number). accepted: when, on the dispatcher's
    clock. last_sign: when it last showed life, and `doing` what it said then.
    began: the backend was called.
    tombstone: cancelled before it arrived, so that its digest is not known.
    claims: answers that are waiting to carry the outcome. delivered: one of them has.
    """

    client_id: str
    key: tuple[str, int]
    operation: Operation
    request: Request
    digest: str | None
    accepted: float
    generates_before: int = 0
    deadline: float | None = None
    state: State = State.HELD
    tombstone: bool = False
    began: bool = False
    result: Any = None
    error: RemoteRLError | None = None
    last_sign: float = 0.0
    doing: str = ""
    claims: int = 0
    delivered: bool = False
    samples: list[Sample] = attrs.field(factory=list)
    progress: ProgressReport | None = None
    progress_sent: bool = True
    ending: RemoteRLError | None = None
    settled: asyncio.Event = attrs.field(factory=asyncio.Event)
    abort_signal: asyncio.Event = attrs.field(factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def request_id(self) -> str:
        """ "CLIENT:STREAM:NUMBER", unique in the run."""
        return f"{self.client_id}:{self.key[0]}:{self.key[1]}"

    @property
    def done(self) -> bool:
        """Whether the outcome is final."""
        return self.state is State.DONE

    def outcome(self) -> Outcome:
        """Where it stands, as the client hears it."""
        return Outcome(
            stream=self.key[0],
            number=self.key[1],
            done=self.done,
            result=self.result,
            error=self.error,
        )

    def settle(self, result: Any = None, error: RemoteRLError | None = None) -> None:
        """The final outcome; the request and the samples are let go."""
        self.result, self.error, self.state = result, error, State.DONE
        self.request, self.samples = Request(), []
        self.settled.set()

    def end_early(self, reason: RemoteRLError | None) -> None:
        """Asks a running operation to stop: with None its result is kept (an abort), with an
        error that becomes its outcome."""
        if self.ending is None:
            self.ending = reason
        self.abort_signal.set()
