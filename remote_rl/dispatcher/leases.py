"""Dispatcher: who may use the run, a pure state machine (imports errors and messages).

One driver at a time; each driver's grant begins an epoch. Members belong to an epoch and end with
it. A lease that isn't renewed ends; so does one that is released or taken over. An ended client
never gets its rights back: it attaches anew, under a new client id.
"""

from __future__ import annotations

from collections import OrderedDict

import attrs

from ..errors import LeaseError
from ..messages import Occupied

#: ended clients of which the reason is remembered, the latest
REMEMBERED = 4096


@attrs.define
class Lease:
    """One client's right. ordinal: 0 for the driver, then 1, 2, ... in order of attachment."""

    client_id: str
    epoch: int
    ordinal: int
    expires: float
    renewals: int = 0

    @property
    def role(self) -> str:
        """ "driver" or "member"."""
        return "driver" if self.ordinal == 0 else "member"


class Leases:
    """All leases of a run. Times are of the dispatcher's clock, in seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.epoch = 0
        self._held: dict[str, Lease] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._members = 0

    @property
    def driver(self) -> Lease | None:
        """The driver's lease, if one is held."""
        return next((lease for lease in self._held.values() if lease.ordinal == 0), None)

    def held(self) -> tuple[Lease, ...]:
        """All leases that are held."""
        return tuple(self._held.values())

    def attach_driver(self, client_id: str, now: float, takeover: bool) -> Lease | Occupied:
        """A new epoch for this client, or how long the present driver's lease may last."""
        known = self._known(client_id)
        if known is not None:
            return known
        driver = self.driver
        if driver is not None and not takeover:
            return Occupied(remaining=max(0.0, driver.expires - now), renewals=driver.renewals)
        if driver is not None:
            self._end_epoch("another client took the run over")
        self.epoch += 1
        self._members = 0
        return self._grant(client_id, 0, now)

    def attach_member(self, client_id: str, epoch: int, now: float) -> Lease:
        """A lease under the driver's epoch that a handle names."""
        known = self._known(client_id)
        if known is not None:
            return known
        if epoch != self.epoch or self.driver is None:
            raise LeaseError(
                f"the handle is of epoch {epoch}, whose driver no longer holds the run; "
                "take a new handle from the present driver"
            )
        self._members += 1
        return self._grant(client_id, self._members, now)

    def renew(self, client_id: str, now: float) -> Lease:
        """The client's lease, renewed; `LeaseError` where it has none."""
        lease = self._held.get(client_id)
        if lease is None:
            raise self.refusal(client_id)
        lease.expires = now + self.seconds
        lease.renewals += 1
        return lease

    def expire(self, now: float) -> tuple[Lease, ...]:
        """Ends what has run out and returns it, members of an ended driver included."""
        ended: list[Lease] = []
        for late in [lease for lease in self._held.values() if lease.expires <= now]:
            ended += self.end(late.client_id, f"not renewed for {self.seconds:g} s")
        return tuple(ended)

    def end(self, client_id: str, reason: str) -> tuple[Lease, ...]:
        """Ends one lease, with a driver's its whole epoch; returns what ended."""
        lease = self._held.get(client_id)
        if lease is None:
            return ()
        if lease.ordinal == 0:
            return self._end_epoch(reason)
        del self._held[client_id]
        self._remember(client_id, reason)
        return (lease,)

    def _remember(self, client_id: str, reason: str) -> None:
        self._ended[client_id] = reason
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def ended(self, client_id: str) -> bool:
        """Whether the client held a lease that is over, as far as is remembered."""
        return client_id in self._ended

    def refusal(self, client_id: str) -> LeaseError:
        """Why the client has no right to the run, and what to do."""
        return LeaseError(
            f"client {client_id} holds no lease of the run: {self.reason(client_id)}; connect "
            "again",
            client_id=client_id,
        )

    def reason(self, client_id: str) -> str:
        """Why the client holds no lease."""
        return self._ended.get(client_id, "it never attached to this run, or left it long ago")

    def _end_epoch(self, reason: str) -> tuple[Lease, ...]:
        ended = self.held()
        for lease in ended:
            own = reason if lease.ordinal == 0 else f"its driver's lease ended ({reason})"
            self._remember(lease.client_id, own)
        self._held.clear()
        return ended

    def _known(self, client_id: str) -> Lease | None:
        if client_id in self._ended:
            raise LeaseError(
                f"client {client_id} held a lease that ended: {self._ended[client_id]}; "
                "connect again",
                client_id=client_id,
            )
        return self._held.get(client_id)

    def _grant(self, client_id: str, ordinal: int, now: float) -> Lease:
        lease = Lease(client_id, self.epoch, ordinal, now + self.seconds)
        self._held[client_id] = lease
        return lease
