"""Server: a dispatcher inside a Ray actor (imports transports' parcels, life, dispatcher, registry,
the contract; not Ray itself)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from ..dispatcher import Dispatcher
from ..errors import (
    InvalidRequestError,
    ProtocolError,
    RemoteRLError,
    RunLostError,
    as_remote_error,
)
from ..messages import Message
from ..registry import create_backend
from ..transports.bodies import too_large
from ..transports.parcels import Parcel, pack, parcel_bytes, unpack
from ..wire import encode
from .life import run_over
from .replies import reply_frame

log = logging.getLogger("remote_rl.server")

#: decoding looks at every number once, 0.1 ms for a MB; above this size off the loop
_DECODE_ON_LOOP_BYTES = 1 << 20
#: for answers that are under way when the run ends
_LAST_ANSWERS_SECONDS = 5.0


class ServedRun:
    """What becomes the actor. Its methods are called by name through Ray: `answer` by clients, the
    others by whoever started it. They return errors instead of raising them, so that Ray neither
    wraps nor logs them."""

    def __init__(self, max_body: int) -> None:
        self._max_body = max_body
        self._dispatcher: Dispatcher | None = None
        self._doing = ""
        self._answering = 0
        self._stop = asyncio.Event()

    async def start(
        self, backend_name: str, options: Mapping[str, Any], **settings: Any
    ) -> RemoteRLError | None:
        """Creates the backend and starts it; what went wrong, or None."""

        def hear(what: str) -> None:
            self._doing = what

        try:
            dispatcher = Dispatcher(create_backend(backend_name, dict(options)), **settings)
            await dispatcher.start(hear)
        except Exception as error:  # noqa: BLE001 - whoever started it raises it
            return as_remote_error(error)
        self._dispatcher = dispatcher
        return None

    async def doing(self) -> str:
        """What the start is doing."""
        return self._doing

    async def answer(self, parcel: Parcel) -> Parcel | str:
        """One message to its reply, or to an error; text where there is nothing to answer yet."""
        if self._dispatcher is None:
            return f"its backend is still starting{self._doing and ', '}{self._doing}"
        self._answering += 1
        try:
            return pack(reply_frame(await self._dispatcher.handle(await self._message(parcel))))
        except RemoteRLError as error:
            return pack(encode(error))
        except Exception as error:
            log.exception("a message failed")
            return pack(encode(as_remote_error(error)))
        finally:
            self._answering -= 1

    async def _message(self, parcel: Parcel) -> Message:
        size = parcel_bytes(parcel)
        if size > self._max_body:
            raise too_large(self._max_body)
        if size > _DECODE_ON_LOOP_BYTES:
            message = await asyncio.to_thread(unpack, parcel)
        else:
            message = unpack(parcel)
        if not isinstance(message, Message):
            raise ProtocolError(f"a {type(message).__name__} is no message that a client sends")
        return message

    async def run_over(self, grace: float, lease: float) -> RunLostError | None:
        """Waits until `stop` or until the run is lost, and ends it: what was lost."""
        if self._dispatcher is None:
            raise InvalidRequestError("the run has not started")
        try:
            return await run_over(self._dispatcher, self._stop, grace=grace, lease=lease)
        finally:
            await self._dispatcher.close()
            await self._last_answers()

    async def stop(self) -> None:
        """Asks for the end."""
        self._stop.set()

    async def _last_answers(self) -> None:
        """Whoever waits for an answer hears that the run is over before the actor is."""
        loop = asyncio.get_running_loop()
        end = loop.time() + _LAST_ANSWERS_SECONDS
        while self._answering and loop.time() < end:
            await asyncio.sleep(0.01)
