"""Transport: names of Ray actors, and the way into a cluster (imports errors; ray inside)."""

from __future__ import annotations

import logging
import os
import re
import socket
from pathlib import Path
from typing import Any, Self

import attrs

from ..errors import (
    AuthenticationError,
    InvalidRequestError,
    ProtocolError,
    RemoteRLError,
    UnreachableError,
    UnsupportedError,
)

SCHEME = "ray:"
#: where actors are named unless a target says otherwise; Ray's own default is one of each process
NAMESPACE = "remote_rl"
_CONNECT_SECONDS = 5.0
_WORD = re.compile(r"[\w.-]+")
_INSTALL = "pip install 'remote-rl[ray]'"


@attrs.frozen
class Place:
    """An actor's name, and the namespace that it is unique in."""

    name: str
    namespace: str = NAMESPACE

    def __attrs_post_init__(self) -> None:
        for what, word in (("name", self.name), ("namespace", self.namespace)):
            if not _WORD.fullmatch(str(word)):
                raise InvalidRequestError(
                    f"an actor's {what} has letters, digits, '_', '.' and '-', unlike {word!r}",
                    field=what,
                )

    @classmethod
    def of(cls, target: str) -> Self:
        """From "ray:NAME" or "ray:NAMESPACE/NAME"."""
        if target.startswith("ray://"):
            raise InvalidRequestError(
                f"{target!r} is a cluster, not an actor: name the cluster in RAY_ADDRESS (as "
                "HOST:PORT; Ray's client server, ray://, carries no arrays in shared memory) and "
                "connect to ray:NAME",
                field="target",
            )
        first, slash, second = target.removeprefix(SCHEME).partition("/")
        return cls(second, first) if slash else cls(first)

    @property
    def target(self) -> str:
        """For `connect`; without the namespace where it is the usual one."""
        if self.namespace == NAMESPACE:
            return f"{SCHEME}{self.name}"
        return f"{SCHEME}{self.namespace}/{self.name}"


def joined(address: str | None = None) -> Any:
    """The module `ray`, once this process belongs to a cluster: the one it has joined already, else
    that of `address`, of RAY_ADDRESS, or the one that runs on this machine.

    The process stays in it until it ends: arrays that came over Ray lie in the cluster's memory.
    Raises `UnsupportedError` without Ray, `UnreachableError` without a cluster.
    """
    try:
        import ray
    except ImportError as error:
        raise UnsupportedError(f"ray:NAME needs Ray, which is missing here; {_INSTALL}") from error
    where = address or os.environ.get("RAY_ADDRESS") or "auto"
    if ray.is_initialized():
        own = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", own):
            raise InvalidRequestError(
                f"this process belongs to the Ray cluster {own} already and can't join {address!r}",
                field="address",
            )
    elif where.startswith("ray://"):
        where_from = "the address" if address else "RAY_ADDRESS"
        raise UnsupportedError(
            f"{where_from} {where!r} is Ray's client server, which has no shared memory; give the "
            "cluster's own address, HOST:PORT"
        )
    else:
        _refuse_the_ended(where)
        try:
            ray.init(address=where, log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            raise _not_joined(where, error) from error
    return ray


def in_short(error: BaseException) -> str:
    """What Ray says last, the cause, without its advice for every case."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = lines[-1].partition(" Some common causes include")[0] if lines else ""
    return told.rstrip(".") or type(error).__name__


def _refuse_the_ended(where: str) -> None:
    """Raises where nothing listens at a cluster's address: Ray itself would try for a quarter of an
    hour."""
    if where == "auto":  # what `ray start` on this machine has left, perhaps long ago
        last = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
        if not last.is_file():
            return
        where = last.read_text().strip()
    host, colon, port = where.rpartition(":")
    if not colon or not port.isdecimal():
        return  # Ray says what is wrong with it, at once
    own = (socket.gethostname(),) if host in ("127.0.0.1", "localhost") else ()
    refusal: OSError | None = None
    for each in (host.strip("[]"), *own):
        try:
            socket.create_connection((each, int(port)), _CONNECT_SECONDS).close()
            return
        except (OSError, OverflowError, UnicodeError) as error:
            refusal = refusal or OSError(str(error))
    assert refusal is not None
    raise _not_joined(where, refusal) from refusal


def _not_joined(where: str, error: Exception) -> RemoteRLError:
    told = f"{error} {error.__cause__ or ''}"
    if "AuthToken" in told or "AuthenticationError" in told:
        return AuthenticationError(
            f"the Ray cluster {where!r} wants its token; set RAY_AUTH_MODE=token and "
            "RAY_AUTH_TOKEN_PATH to the file that its head was started with"
        )
    first = str(error).strip().split("\n", 1)[0]
    if "ersion mismatch" in told:
        return ProtocolError(f"the Ray cluster {where!r} can't be joined: {first}")
    return UnreachableError(
        f"no Ray cluster answers at {where!r} ({first}); start one with `ray start --head`, or "
        "name it in RAY_ADDRESS"
    )
