"""Transport: from an address to the transport that leads there (imports errors and messages; a
transport when it is used)."""

from __future__ import annotations

from ..errors import InvalidRequestError, UnreachableError
from ..messages import ConnectionLost, Transport

_HTTP = ("http://", "https://")
_RAY = "ray:"


def is_address(target: str) -> bool:
    """Whether it names a run elsewhere: "http://...", "https://...", "ray:NAME"."""
    return target.startswith((*_HTTP, _RAY))


def transport_to(
    address: str, *, token: str | None = None, ca_file: str | None = None
) -> Transport:
    """The transport to the run at `address`; token and ca_file are for HTTP alone.

    Raises `InvalidRequestError` for what is no address. Over Ray it also joins the cluster and
    looks for the actor: `UnsupportedError`, `UnreachableError`.
    """
    if not address.startswith(_RAY):
        from .http import HttpTransport

        return HttpTransport(address, token=token, ca_file=ca_file)
    for name, value in (("token", token), ("ca_file", ca_file)):
        if value is not None:
            raise InvalidRequestError(
                f"{name}= is for an http:// address; a Ray cluster has its own ways to be trusted",
                field=name,
            )
    from .ray import RayTransport

    return RayTransport(address)


def nothing_answers(target: str, lost: ConnectionLost) -> UnreachableError:
    """What to say of an address that did not answer in time."""
    if lost.ended:
        return UnreachableError(f"what served at {target} has ended ({lost}); start it again")
    if target.startswith(_RAY):
        return UnreachableError(f"nothing answers at {target} ({lost}); see what its actor logs")
    return UnreachableError(
        f"nothing answers at {target} ({lost}); is `remote-rl serve` running there, and without "
        "TLS (https://) where the address is http://?"
    )
