"""Dispatcher: who holds generation, and pauses and resumes one after the other (imports ops,
requests, rules, record)."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from ..ops import OPERATIONS, Stream
from ..requests import Resume
from ..types.results import Done
from .record import Record, State
from .rules import Rules

log = logging.getLogger("remote_rl.dispatcher")

NAMES = frozenset({"pause", "resume"})


class Pauses:
    """Pauses and resumes of all clients. They reach the backend in the order of their acceptance,
    so that the newest decides; a pause ends with the client that asked for it.

    execute: runs a record on the backend. begin: makes a task of a coroutine.
    """

    def __init__(
        self,
        rules: Rules,
        execute: Callable[[Record], Awaitable[None]],
        begin: Callable[[Record, Coroutine[Any, Any, None]], None],
        now: Callable[[], float],
    ) -> None:
        self._rules = rules
        self._execute = execute
        self._begin = begin
        self._now = now
        self._askers: set[str] = set()
        self._accepted: list[Record] = []

    def accept(self, record: Record) -> None:
        """A pause or resume of a client: it runs when those before it have their outcome."""
        record.state = State.QUEUED
        self._begin(record, self._in_turn(record, self._before(record)))

    def _before(self, record: Record) -> list[Record]:
        """Those without an outcome that were accepted before this one."""
        earlier = [each for each in self._accepted if not each.done]
        self._accepted = [*earlier, record]
        return earlier

    async def _in_turn(self, record: Record, earlier: list[Record]) -> None:
        await _settled(earlier)
        await self._execute(record)

    def succeeded(self, record: Record) -> None:
        """The backend has done it."""
        if record.operation.name == "resume":
            self._askers.clear()
        elif record.done or record.ending is not None:
            # its asker was told that it failed, or has left: nobody would resume
            self._lift(record.client_id)
        else:
            self._askers.add(record.client_id)

    def client_ended(self, client_id: str) -> None:
        """Lifts the pause that only this client asked for: nobody else would."""
        if client_id in self._askers:
            self._askers.discard(client_id)
            self._lift(client_id)

    def _lift(self, client_id: str) -> None:
        if self._askers:
            return
        record = Record(
            client_id=client_id,
            key=(Stream.CONTROL.value, 0),
            operation=OPERATIONS["resume"],
            request=Resume(),
            digest=None,
            accepted=self._now(),
            state=State.QUEUED,
        )
        self._begin(record, self._lifted(record, self._before(record)))

    async def _lifted(self, record: Record, earlier: list[Record]) -> None:
        await _settled(earlier)
        if self._askers or not self._rules.paused:  # somebody has paused or resumed meanwhile
            record.settle(result=Done(version=self._rules.version))
            return
        log.info("generation goes on: client %s, which had paused it, has left", record.client_id)
        await self._execute(record)
        if record.error is not None:
            log.error("the pause of a client that has left can't be lifted: %s", record.error)


async def _settled(earlier: list[Record]) -> None:
    for each in earlier:
        await each.settled.wait()  # a stall settles it, too
