"""Server: one process that serves one run until it is told to stop (imports app, life,
dispatcher, registry)."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
from aiohttp import web

from ..dispatcher import DEFAULT_BUDGET, Dispatcher
from ..errors import InvalidRequestError
from ..registry import create_backend
from .app import DEFAULT_IO_TIMEOUT, DEFAULT_MAX_BODY, application, runner
from .life import print_line, run_over, started, stop_signals

log = logging.getLogger("remote_rl.server")

DEFAULT_PORT = 7700


@attrs.frozen(kw_only=True)
class Endpoint:
    """Where a server listens and who may speak to it.

    port: 0 takes a free one. token: None only on loopback. certificate, key: PEM files; both or
    neither (the key may lie in the certificate's file).
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    token: str | None = None
    certificate: str | None = None
    key: str | None = None

    def tls(self) -> ssl.SSLContext | None:
        """The context of an https server, None for http."""
        if self.certificate is None:
            if self.key is not None:
                raise InvalidRequestError("a TLS key without a certificate; give both")
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.certificate, self.key, _no_passphrase)
        except (OSError, ValueError) as error:  # an SSLError is an OSError, too
            raise InvalidRequestError(
                f"certificate {self.certificate!r} and key {self.key!r} can't be used: {error}"
            ) from error
        return context

    def bind(self) -> socket.socket:
        """A bound socket that doesn't listen yet: a taken port shows before the backend starts."""
        family, address = self._resolved()
        if self.token is None and not ipaddress.ip_address(address[0]).is_loopback:
            raise InvalidRequestError(
                f"a server on {self.host} can be reached from other machines and has no token; "
                "give it one (--token-file FILE or REMOTE_RL_TOKEN), or listen on 127.0.0.1"
            )
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError as error:
            bound.close()
            raise InvalidRequestError(
                f"{self.host} port {self.port} can't be used: {error.strerror}"
            ) from error
        return bound

    def _resolved(self) -> tuple[socket.AddressFamily, Any]:
        if not 0 <= self.port <= 65535:  # the system would take it modulo 65536
            raise InvalidRequestError(f"a port is 0 to 65535, not {self.port}")
        try:
            found = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
        except (OSError, UnicodeError) as error:
            raise InvalidRequestError(f"there is no host {self.host!r} here: {error}") from error
        first = min(found, key=lambda one: one[0] != socket.AF_INET)
        return first[0], first[4]

    def url(self, bound: socket.socket) -> str:
        """How clients reach the bound socket."""
        address, port = bound.getsockname()[:2]
        host = socket.gethostname() if ipaddress.ip_address(address).is_unspecified else self.host
        scheme = "http" if self.certificate is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


@attrs.frozen(kw_only=True)
class Limits:
    """How much and how long. max_body: bytes of the largest message. budget: bytes of arrays kept
    for each client. lease: seconds for which a silent client keeps its rights. stall: for which a
    running operation may report nothing. io_timeout: for which a body may stand still. grace: for
    which what runs may go on once a stop was asked for."""

    max_body: int = DEFAULT_MAX_BODY
    budget: int = DEFAULT_BUDGET
    lease: float = 60.0
    stall: float = 300.0
    io_timeout: float = DEFAULT_IO_TIMEOUT
    grace: float = 30.0


async def serve(
    backend_name: str,
    options: Mapping[str, Any],
    endpoint: Endpoint,
    *,
    checkpoint_dir: str | Path | None = None,
    limits: Limits | None = None,
    announce: Callable[[str], None] | None = None,
) -> None:
    """Creates the backend, starts it, and serves it until SIGINT or SIGTERM.

    announce: gets the one line that says where, once clients can connect; by default it is
    printed. Whatever is wrong with the arguments is raised before the backend starts. A run that
    is lost is told to its clients for as long as they hold a lease, and then raised as
    `RunLostError`.
    """
    limits = limits or Limits()
    context = endpoint.tls()
    backend = create_backend(backend_name, dict(options))
    dispatcher = Dispatcher(
        backend,
        checkpoint_dir=checkpoint_dir,
        lease_seconds=limits.lease,
        stall_timeout=limits.stall,
        budget_bytes=limits.budget,
    )
    with contextlib.closing(endpoint.bind()) as bound, stop_signals() as stop:
        if not await started(dispatcher, backend_name, stop):
            return
        app_runner = runner(
            application(
                dispatcher,
                token=endpoint.token,
                max_body=limits.max_body,
                io_timeout=limits.io_timeout,
            )
        )
        try:
            await app_runner.setup()
            site = web.SockSite(app_runner, bound, ssl_context=context)
            await site.start()
            url = endpoint.url(bound)
            log.info("serving %s at %s", backend_name, url)
            (announce or print_line)(
                f'remote_rl: serving {backend_name} at {url} - connect("{url}")'
            )
            lost = await run_over(dispatcher, stop, grace=limits.grace, lease=limits.lease)
            await site.stop()
        finally:
            await dispatcher.close()
            await app_runner.cleanup()
    if lost is not None:
        raise lost.copy()


def _no_passphrase() -> str:
    # otherwise it would be asked for at a terminal that a server may not have
    raise ValueError("the key is encrypted; give one without a passphrase")
