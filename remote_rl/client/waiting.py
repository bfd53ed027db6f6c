"""Client: the one wait under way for all outcomes of a client (imports messages and link)."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from ..messages import Wait, Waited
from .link import Link

_WAIT = 20.0
#: one that is lost is repeated with half the time, for a gateway may allow less; down to this
_SHORTEST = 0.5
#: beyond the wait itself, before the connection counts as lost
_PATIENCE = 10.0


class Waiting:
    """Asks for outcomes, and asks anew when told to."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._poke = asyncio.Event()
        self._longest = math.inf

    def ask_anew(self) -> None:
        """Ends the present wait, since the next one has more to ask for; on the loop."""
        self._poke.set()

    async def ask(self, cursors: dict[str, int]) -> Waited | None:
        """What has happened, or None where it is time to ask anew."""

        lost = False

        def build(leased: dict[str, Any]) -> Wait:
            nonlocal lost
            seconds = min(_WAIT, self._longest)
            if lost and seconds > _SHORTEST:
                seconds = self._longest = seconds / 2
            lost = True  # unless this one is answered, it is built once more
            return Wait(timeout=seconds, cursors=cursors, **leased)

        talk = asyncio.ensure_future(self._link.talk(build, _WAIT + _PATIENCE))
        poke = asyncio.ensure_future(self._poke.wait())
        try:
            await asyncio.wait([talk, poke], return_when=asyncio.FIRST_COMPLETED)
            if talk.done():
                waited: Waited = talk.result()
                return waited
            return None
        finally:
            self._poke.clear()
            for task in (talk, poke):
                if not task.done():
                    task.cancel()
            await asyncio.gather(talk, poke, return_exceptions=True)
