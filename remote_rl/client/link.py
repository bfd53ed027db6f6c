"""Client: one message at a time, resent until it is answered (imports the contract and
seen_checkpoints)."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Any

from ..errors import ProtocolError, RemoteRLError, UnreachableError
from ..messages import ConnectionLost, Grant, Key, Message, Renew, Transport, Wait
from .seen_checkpoints import SeenCheckpoints

log = logging.getLogger("remote_rl.client")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
#: between two tries at an address where nothing listens
_PAUSE_WHEN_REFUSED = 0.5
#: a client with nothing under way asks this often whether the other side lives
_PROBE = 2.5
#: an address that has refused for so long belongs to a process that has ended
_REFUSED = 10.0
#: after a lease's length of silence, for a last try: it may be this process that stood still
_LAST_TRY = 5.0
#: a message that is lost so often, for two leases' length, while others arrive, never will
_TRIES = 5
#: seconds; a wait of more may be lost to a limit of time
_LONG_WAIT = 1.0

#: makes a message from the fields that every leased one has
Build = Callable[[dict[str, Any]], Message]


class Link:
    """A transport, the lease on it, and the acknowledgements that ride along.

    checkpoints: what this client has seen of them, named where the server can't be asked.
    """

    def __init__(self, transport: Transport, grant: Grant) -> None:
        self.transport = transport
        self.grant = grant
        self.checkpoints = SeenCheckpoints()
        self._acknowledgements: list[Key] = []
        self._under_way = 0
        self._last_contact = time.monotonic()
        self._refused_since: float | None = None
        self._last_try_until: float | None = None

    async def talk(self, build: Build, timeout: float) -> Any:
        """The reply to one message, sent until it is answered, the lease's length has passed in
        silence, or its server's process has ended. Raises what the other side raises, or
        `UnreachableError`."""
        tries, began = 0, time.monotonic()
        self._under_way += 1
        try:
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
                    patience = timeout if self._last_try_until is None else self._left(timeout)
                    reply = await self.transport.call(message, patience)
                except (ConnectionLost, RemoteRLError) as error:
                    tries += 1
                    await self._try_again(message, tries, began, error)
                    continue
                self._heard()
                if acknowledged:
                    self._told(acknowledged)
                return reply
        finally:
            self._under_way -= 1

    async def _try_again(
        self, message: Message, tries: int, began: float, error: ConnectionLost | RemoteRLError
    ) -> None:
        """Pauses before the next try of a message that was lost; raises where there is none."""
        if isinstance(error, ProtocolError) and error.details.get("foreign"):
            # a gateway that is being reloaded says such things of a server that was there before
            lost = ConnectionLost(error.message)
            lost.__cause__ = error
        elif isinstance(error, RemoteRLError):
            self._heard()
            raise error
        else:
            lost = error
        self._refuse_the_ended(lost)
        self._refuse_silence(lost)
        self._refuse_lost_alone(message, tries, began, lost)
        log.warning("%s did not answer (%s); trying again", self.transport.target, lost)
        longest = _PAUSE_WHEN_REFUSED if lost.refused else _LONGEST_PAUSE
        pause = min(longest, _FIRST_PAUSE * 2 ** min(tries - 1, 10))
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))

    def acknowledge(self, key: Key) -> None:
        """The next message says that this outcome has arrived."""
        self._acknowledgements.append(key)

    async def renew(self, timeout: float) -> None:
        """A sign of life, and the acknowledgements with it."""
        await self.talk(lambda leased: Renew(**leased), timeout)

    async def keep_lease(self) -> None:
        """Renews the lease whenever a third of it has passed without a message, and sooner where
        nothing is under way by whose loss the end of the server would show; never returns."""
        interval = self.grant.lease_seconds / 3
        probe = min(interval, _PROBE)
        while True:
            await asyncio.sleep(probe / 4)
            silence = time.monotonic() - self._last_contact
            idle = not self._under_way and silence >= probe
            if silence >= interval or idle or self._acknowledgements:
                await self.renew(interval)

    # -- when to give up ------------------------------------------------------------------------

    def _heard(self) -> None:
        self._last_contact = time.monotonic()
        self._refused_since = self._last_try_until = None

    def _left(self, timeout: float) -> float:
        assert self._last_try_until is not None
        return min(timeout, max(0.1, self._last_try_until - time.monotonic()))

    def _refuse_the_ended(self, lost: ConnectionLost) -> None:
        """Gives up an address where nothing has listened for a while, or for good: its process has
        ended. One that is silent only, behind a partition or stopped, may come back."""
        now = time.monotonic()
        if not lost.refused:
            self._refused_since = None
            return
        if self._refused_since is None:
            self._refused_since = now
        patience = 0.0 if lost.ended else min(_REFUSED, self.grant.lease_seconds)
        if patience <= now - self._refused_since:
            raise UnreachableError(
                f"nothing listens at {self.transport.target} any more ({lost}): its server has "
                "ended, and the run with it; start it again and connect with "
                + self.checkpoints.start_hint,
                last_checkpoint=self.checkpoints.last,
            ) from lost

    def _refuse_silence(self, lost: ConnectionLost) -> None:
        now, lease = time.monotonic(), self.grant.lease_seconds
        silence = now - self._last_contact
        if silence <= lease:
            return
        if self._last_try_until is None:
            self._last_try_until = now + min(_LAST_TRY, lease)
        elif now >= self._last_try_until:
            raise UnreachableError(
                f"{self.transport.target} has not answered for {silence:.0f} s ({lost}); the run "
                "may go on there, but this client's lease has ended",
                last_checkpoint=self.checkpoints.last,
            ) from lost

    def _refuse_lost_alone(
        self, message: Message, tries: int, began: float, lost: ConnectionLost
    ) -> None:
        """Gives up a message that is lost every time while others arrive. A long wait is none: a
        gateway that cuts it short does no harm, and the next one is shorter."""
        seconds = time.monotonic() - began
        long_wait = isinstance(message, Wait) and message.timeout > _LONG_WAIT
        if long_wait or tries < _TRIES or seconds < 2 * self.grant.lease_seconds:
            return
        raise UnreachableError(
            f"a {type(message).__name__} to {self.transport.target} was lost {tries} times in "
            f"{seconds:.0f} s ({lost}) while other messages arrive; something between, such as a "
            "gateway with a limit on size or time, never lets it pass",
            last_checkpoint=self.checkpoints.last,
        ) from lost

    def _told(self, acknowledged: tuple[Key, ...]) -> None:
        told = set(acknowledged)
        self._acknowledgements = [key for key in self._acknowledgements if key not in told]
