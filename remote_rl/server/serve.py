"""Server: one process that serves one run until it is told to stop (imports app, dispatcher,
registry)."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
from aiohttp import web

from ..dispatcher import Dispatcher
from ..errors import InvalidRequestError
from ..progress_line import ProgressLine
from ..registry import create_backend
from .app import DEFAULT_MAX_BODY, application, runner

log = logging.getLogger("remote_rl.server")

DEFAULT_PORT = 7700
_STOPPING = (signal.SIGINT, signal.SIGTERM)
_SAME_SIGNAL_SECONDS = 1.0


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
            context.load_cert_chain(self.certificate, self.key)
        except OSError as error:  # an SSLError is one, too
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


async def serve(
    backend_name: str,
    options: Mapping[str, Any],
    endpoint: Endpoint,
    *,
    checkpoint_dir: str | Path | None = None,
    max_body: int = DEFAULT_MAX_BODY,
    lease_seconds: float = 60.0,
    stall_timeout: float = 300.0,
    announce: Callable[[str], None] | None = None,
) -> None:
    """Creates the backend, starts it, and serves it until SIGINT or SIGTERM.

    announce: gets the one line that says where, once clients can connect; by default it is
    printed. Whatever is wrong with the arguments is raised before the backend starts.
    """
    context = endpoint.tls()
    backend = create_backend(backend_name, dict(options))
    dispatcher = Dispatcher(
        backend,
        checkpoint_dir=checkpoint_dir,
        lease_seconds=lease_seconds,
        stall_timeout=stall_timeout,
    )
    with contextlib.closing(endpoint.bind()) as bound, _stop_signals() as stop:
        if not await _started(dispatcher, backend_name, stop):
            return
        app_runner = runner(application(dispatcher, token=endpoint.token, max_body=max_body))
        try:
            await app_runner.setup()
            site = web.SockSite(app_runner, bound, ssl_context=context)
            await site.start()
            url = endpoint.url(bound)
            (announce or _print_line)(
                f'remote_rl: serving {backend_name} at {url} - connect("{url}")'
            )
            await stop.wait()
            log.info("stopping")
            await site.stop()
        finally:
            await dispatcher.close()
            await app_runner.cleanup()


async def _started(dispatcher: Dispatcher, name: str, stop: asyncio.Event) -> bool:
    """Starts the dispatcher; False where a signal came first, with nothing left behind."""
    line, began = ProgressLine(), time.monotonic()
    doing = ""

    def hear(what: str) -> None:
        nonlocal doing
        doing = f", {what}" if what else ""

    log.info("starting %s", name)
    start = asyncio.ensure_future(dispatcher.start(hear))
    stopped = asyncio.ensure_future(stop.wait())
    try:
        while not start.done() and not stopped.done():
            await asyncio.wait((start, stopped), timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
            line.show(f"remote_rl: starting {name}, {time.monotonic() - began:.0f} s{doing}")
        if start.done():
            await start
            return True
        start.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await start
            await dispatcher.close()
        return False
    finally:
        stopped.cancel()
        line.clear()


@contextlib.contextmanager
def _stop_signals() -> Iterator[asyncio.Event]:
    """An event that SIGINT or SIGTERM sets. Who starts processes often passes a signal on to one
    that has it already, so only a second Ctrl-C some time after the first cuts the stop short."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    first = 0.0

    def release() -> None:
        for number in _STOPPING:
            loop.remove_signal_handler(number)

    def hear(number: signal.Signals) -> None:
        nonlocal first
        if not stop.is_set():
            first = loop.time()
            stop.set()
        elif number is signal.SIGINT and loop.time() - first > _SAME_SIGNAL_SECONDS:
            release()
            signal.raise_signal(number)

    for number in _STOPPING:
        loop.add_signal_handler(number, hear, number)
    try:
        yield stop
    finally:
        release()


def _print_line(line: str) -> None:
    print(line, flush=True)
