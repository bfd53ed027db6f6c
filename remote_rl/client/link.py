"""Client: one message at a time, resent until it is answered (imports the contract)."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Any

from ..errors import UnreachableError
from ..messages import ConnectionLost, Grant, Key, Message, Renew, Transport

log = logging.getLogger("remote_rl.client")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0

#: makes a message from the fields that every leased one has
Build = Callable[[dict[str, Any]], Message]


class Link:
    """A transport, the lease on it, and the acknowledgements that ride along."""

    def __init__(self, transport: Transport, grant: Grant) -> None:
        self.transport = transport
        self.grant = grant
        self._acknowledgements: list[Key] = []
        self._last_contact = time.monotonic()

    async def talk(self, build: Build, timeout: float) -> Any:
        """The reply to one message, sent until it is answered or the lease's length has passed in
        silence. Raises what the other side raises, or `UnreachableError`."""
        pause = _FIRST_PAUSE
        while True:
            acknowledged = tuple(self._acknowledgements)
            message = build(
                {
                    "client_id": self.grant.client_id,
                    "instance_id": self.grant.instance_id,
                    "acknowledged": acknowledged,
                }
            )
            try:
                reply = await self.transport.call(message, timeout)
            except ConnectionLost as lost:
                self._refuse_silence(lost)
                log.warning("%s did not answer (%s); trying again", self.transport.target, lost)
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(_LONGEST_PAUSE, 2 * pause)
                continue
            self._last_contact = time.monotonic()
            self._told(acknowledged)
            return reply

    def acknowledge(self, key: Key) -> None:
        """The next message says that this outcome has arrived."""
        self._acknowledgements.append(key)

    async def keep_lease(self) -> None:
        """Renews the lease whenever a third of it has passed without a message; never returns."""
        interval = self.grant.lease_seconds / 3
        while True:
            await asyncio.sleep(interval / 4)
            if time.monotonic() - self._last_contact >= interval or self._acknowledgements:
                await self.talk(lambda leased: Renew(**leased), interval)

    def _refuse_silence(self, lost: ConnectionLost) -> None:
        silence = time.monotonic() - self._last_contact
        if silence > self.grant.lease_seconds:
            raise UnreachableError(
                f"{self.transport.target} has not answered for {silence:.0f} s ({lost}); the run "
                "may go on there, but this client's lease has ended"
            ) from lost

    def _told(self, acknowledged: tuple[Key, ...]) -> None:
        if acknowledged:
            told = set(acknowledged)
            self._acknowledgements = [key for key in self._acknowledgements if key not in told]
