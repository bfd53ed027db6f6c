"""Server: who may speak to it, the refusals that have a status of their own, and what is logged of
each request (imports errors and bodies; aiohttp)."""

from __future__ import annotations

import functools
import hmac
import ipaddress
import logging

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

from ..errors import AuthenticationError, RemoteRLError
from ..transports.bodies import ROUTES

#: what is logged as it came
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"))
_PATHS = frozenset((*ROUTES, "/healthz", "/metrics"))


class Refusal(Exception):
    """An error with a status of its own."""

    def __init__(self, status: int, error: RemoteRLError, **headers: str) -> None:
        super().__init__(error.message)
        self.status, self.error = status, error
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class Access:
    """token: what `Authorization: Bearer` must hold; without one, only requests that name a
    loopback host are served, so that no page of a browser reaches the server by a name of its
    own (DNS rebinding)."""

    def __init__(self, token: str | None) -> None:
        self._token = None if token is None else token.encode()

    def check(self, request: web.Request) -> None:
        """Raises a `Refusal`, before anything of the body is read."""
        if self._token is None:
            if not _names_loopback(request.host):
                raise Refusal(
                    403,
                    AuthenticationError(
                        f"a server without a token answers to loopback names only, not to "
                        f"{request.host!r}"
                    ),
                )
            return
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        presented = given.strip().encode("utf-8", "surrogateescape")
        # compared whole, whatever was sent: how long it takes says nothing of where they differ
        right = hmac.compare_digest(presented, self._token)
        if kind.lower() != "bearer" or not right:
            problem = "is wrong" if presented else "is missing"
            raise Refusal(
                401,
                AuthenticationError(
                    f"the token {problem}; pass token= or set REMOTE_RL_TOKEN to what the "
                    "server's --token-file holds"
                ),
                WWW_Authenticate="Bearer",
            )

    def allows(self, request: web.Request) -> bool:
        """Whether `check` would let it pass."""
        try:
            self.check(request)
        except Refusal:
            return False
        return True


class AccessLines(AbstractAccessLogger):
    """One line a request, of what the server knows by name: whatever else a client wrote into its
    request line or its headers may be a secret, even its own token."""

    @property
    def enabled(self) -> bool:
        """Whether anybody reads the lines."""
        return self.logger.isEnabledFor(logging.INFO)

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        """The line."""
        method = request.method if request.method in _METHODS else "other"
        path = request.path if request.path in _PATHS else "other"
        self.logger.info(
            "%s %s %s %d, %d bytes, %.3f s",
            *(request.remote, method, path, response.status, response.body_length, time),
            extra={"method": method, "path": path, "status": response.status, "seconds": time},
        )


@functools.lru_cache(maxsize=64)  # the same for every request of a client; bounded, it is theirs
def _names_loopback(host: str) -> bool:
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    name = name.strip("[]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
