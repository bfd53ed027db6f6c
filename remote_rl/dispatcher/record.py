"""Dispatcher: one accepted operation, from acceptance to acknowledgement (imports the contract,
budget)."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from typing import Any

import attrs

from ..errors import RemoteRLError
from ..messages import Digest, Outcome, ProgressReport
from ..ops import Operation
from ..requests import Request
from ..types.generation import Sample
from .budget import Ledger, array_bytes, lies_in_a_message


class State(enum.Enum):
    """HELD waits for an earlier number, QUEUED for its turn."""

    HELD = "held"
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"


_LET_GO = Request()


@attrs.define(eq=False)
class Record:
    """What the dispatcher knows of one operation.

    client_id, ordinal: whose it is. key: (stream, number). accepted: when, on the dispatcher's
    clock. started: when it began to run. last_sign: when it last showed life, and `doing` what it
    said then.
    done: the outcome is final. began: the backend was called.
    tombstone: cancelled before it arrived, so that its digest is not known.
    observer: hears of its end, once.
    ledger: where `kept`, the bytes that are kept for it, is counted.
    copies: how often it has come, or been asked about. claims: answers that are waiting to carry
    the outcome.
    delivered: the answer to its only copy has.
    """

    client_id: str
    key: tuple[str, int]
    operation: Operation
    request: Request
    digest: Digest | None
    accepted: float
    started: float | None = None
    generates_before: int = 0
    deadline: float | None = None
    state: State = State.HELD
    done: bool = attrs.field(default=False, init=False)
    tombstone: bool = False
    began: bool = False
    result: Any = None
    error: RemoteRLError | None = None
    last_sign: float = 0.0
    doing: str = ""
    copies: int = 0
    claims: int = 0
    delivered: bool = False
    samples: list[Sample] = attrs.field(factory=list)
    progress: ProgressReport | None = None
    progress_sent: bool = True
    ending: RemoteRLError | None = None
    _settled: asyncio.Event | None = None
    _abort_signal: asyncio.Event | None = None
    task: asyncio.Task[None] | None = None
    observer: Callable[[Record], None] | None = None
    ledger: Ledger | None = None
    kept: int = 0

    @property
    def request_id(self) -> str:
        """ "CLIENT:STREAM:NUMBER", unique in the run."""
        return f"{self.client_id}:{self.key[0]}:{self.key[1]}"

    # few operations are ever waited for or aborted: the signals are made for those

    @property
    def settled(self) -> asyncio.Event:
        """Set once the outcome is final."""
        if self._settled is None:
            self._settled = asyncio.Event()
            if self.done:
                self._settled.set()
        return self._settled

    @property
    def abort_signal(self) -> asyncio.Event:
        """Set once it was asked to stop."""
        if self._abort_signal is None:
            self._abort_signal = asyncio.Event()
        return self._abort_signal

    @property
    def told_to_end(self) -> bool:
        """Whether it was asked to stop."""
        return self._abort_signal is not None and self._abort_signal.is_set()

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
        first = not self.done
        self.result, self.error, self.state, self.done = result, error, State.DONE, True
        if first and self.observer is not None:
            self.observer(self)
        size = array_bytes(result)
        if lies_in_a_message(result):  # a result that shares the request's rows holds its body
            size += array_bytes(self.request)
        self.request, self.samples = _LET_GO, []
        self.keep(size)
        if self._settled is not None:
            self._settled.set()

    def add_sample(self, sample: Sample) -> None:
        """One more sample of a running generate."""
        self.samples.append(sample)
        self.keep(self.kept + array_bytes(sample))

    def forget(self) -> None:
        """Its outcome was acknowledged, and its client's streams let it go; whoever else still
        knows the record holds no arrays by it."""
        self.result = None
        if self.kept:
            self.keep(0)

    def keep(self, size: int) -> None:
        """From now on so many bytes are kept for it."""
        difference, self.kept = size - self.kept, size
        if difference and self.ledger is not None:
            self.ledger.change(difference)

    def end_early(self, reason: RemoteRLError | None) -> None:
        """Asks a running operation to stop: with None its result is kept (an abort), with an
        error that becomes its outcome."""
        if self.ending is None:
            self.ending = reason
        self.abort_signal.set()
