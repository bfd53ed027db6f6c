"""Transport: the dispatcher in this process, on the client's own loop (imports dispatcher,
messages)."""

from __future__ import annotations

from typing import Any

from ..dispatcher import Dispatcher
from ..messages import Message
from ..requests import Request


class InProcessTransport:
    """Hands messages over as the objects they are: no frame, no digest, no copy."""

    submits = 1_000_000

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    @property
    def target(self) -> str:
        """The backend's name."""
        return self._dispatcher.backend.name

    async def call(self, message: Message, timeout: float) -> Any:
        """The dispatcher's own answer; nothing can get lost, so `timeout` never matters."""
        return await self._dispatcher.handle(message)

    def digest(self, request: Request) -> None:
        """None: an object is not resent."""

    async def close(self) -> None:
        """Ends the run: it belongs to the session that made it."""
        await self._dispatcher.close()
