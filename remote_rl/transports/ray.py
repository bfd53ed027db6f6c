"""Transport: messages to a dispatcher in a named Ray actor (imports ray_cluster, parcels,
silence, wire, messages, errors).

One actor call a message, whose answer is the reply. The cluster is trusted: whoever may join it may
call the actor, so there is no token beside Ray's own.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ..errors import InvalidRequestError, ProtocolError, RemoteRLError, UnreachableError
from ..messages import ConnectionLost, Message, PendingDigest, Submit
from ..requests import Request
from ..wire import encode, seal
from ..wire.digests import RequestDigest
from .parcels import Parcel, pack, unpack
from .ray_cluster import Place, in_short, joined
from .silence import Silence, Silences

SUBMITS = 32
#: from here on a message is written to the object store by another thread than the loop's
_AWAY_FROM_LOOP_BYTES = 1 << 20


class RayTransport:
    """Speaks to the actor that `target` names, "ray:NAME" or "ray:NAMESPACE/NAME".

    Joins a cluster where this process is in none (`joined`). Usable from any event loop.
    Raises `UnreachableError` where there is no such actor.
    """

    def __init__(self, target: str) -> None:
        self._place = Place.of(target)
        ray = joined()
        self._ray = ray
        self._closed = False
        self._silences: Silences | None = None
        try:
            actor = ray.get_actor(self._place.name, namespace=self._place.namespace)
        except ValueError as error:
            raise UnreachableError(
                f"there is no actor {self._place.name!r} in namespace {self._place.namespace!r} of "
                f"the Ray cluster {ray.get_runtime_context().gcs_address}; start it with "
                f"`remote-rl serve BACKEND --ray-name {self._place.name}`"
            ) from error
        except ray.exceptions.RayError as error:
            raise UnreachableError(f"the Ray cluster does not answer: {in_short(error)}") from error
        if not hasattr(actor, "answer"):
            raise ProtocolError(
                f"the actor at {self.target} is none of remote_rl's, or of another version of it"
            )
        self._answer = actor.answer

    @property
    def target(self) -> str:
        """As `connect` takes it."""
        return self._place.target

    @property
    def submits(self) -> int:
        """How many submits may be under way at once."""
        return SUBMITS

    def digest(self, request: Request) -> PendingDigest:
        """As over HTTP."""
        return seal(request)

    async def close(self) -> None:
        """Later calls are lost, those under way end as ever; the process stays in the cluster."""
        self._closed = True

    async def call(self, message: Message, timeout: float) -> Any:
        """The dispatcher's reply. `timeout`: seconds from when the message is in Ray's hands. A
        call that is given up is cancelled in the actor."""
        errors = self._ray.exceptions
        if self._closed:
            raise ConnectionLost("the transport is closed")
        if not self._ray.is_initialized():
            raise ConnectionLost("this process has left the Ray cluster", refused=True, ended=True)
        try:
            parcel = await self._carried(message, timeout)
        except errors.ActorDiedError as error:
            raise ConnectionLost(in_short(error), refused=True, ended=True) from error
        except errors.RayTaskError as error:
            raise ProtocolError(
                f"the actor at {self.target} can't take this message ({in_short(error.cause)}); "
                "use the same remote-rl on both sides"
            ) from error
        except errors.RayError as error:
            raise ConnectionLost(in_short(error)) from error
        if isinstance(parcel, str):
            raise ConnectionLost(parcel)
        try:
            reply = unpack(parcel)
        except InvalidRequestError as error:
            raise ProtocolError(
                f"the answer of {self.target} can't be read ({error}); use the same remote-rl on "
                "both sides"
            ) from error
        if isinstance(reply, RemoteRLError):
            raise reply
        return reply

    async def _carried(self, message: Message, timeout: float) -> Parcel | str:
        """What the actor answers."""
        if _size(message) >= _AWAY_FROM_LOOP_BYTES:
            reference = await asyncio.to_thread(self._hand_over, message)
        else:
            reference = self._hand_over(message)
        answer = asyncio.wrap_future(reference.future())
        try:
            with self._silence(timeout):
                parcel: Parcel | str = await answer
                return parcel
        except TimeoutError as error:
            self._ray.cancel(reference)
            raise ConnectionLost(f"no answer within {timeout:g} s") from error
        except asyncio.CancelledError:
            self._ray.cancel(reference)
            raise

    def _silence(self, seconds: float) -> Silence:
        silences = self._silences
        if silences is None or silences.loop is not asyncio.get_running_loop():
            silences = self._silences = Silences()  # another loop's calls keep their own
        return silences.watch(seconds)

    def _hand_over(self, message: Message) -> Any:
        """The reference of the answer to come; large arrays are in the object store by then."""
        if isinstance(message, Submit) and isinstance(message.digest, RequestDigest):
            message.digest.text()  # so that the frame doesn't end in it
        return self._answer.remote(pack(encode(message)))


def _size(message: Message) -> int:
    """Bytes of a request; other messages are small."""
    if isinstance(message, Submit) and isinstance(message.digest, RequestDigest):
        return message.digest.nbytes
    return 0
