"""Command line: one question to a server (imports errors, messages, commands.values; the transport
when it is asked)."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from .values import add_access, positive_seconds, read_token

if TYPE_CHECKING:
    from ..messages import Message, Transport


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Which server, and what it takes to be answered."""
    parser.add_argument("url", help="http://HOST:PORT of the server, or ray:NAME of the actor")
    add_access(parser)
    parser.add_argument(
        "--timeout", type=positive_seconds, default=5.0, metavar="SECONDS", help="(%(default)g)"
    )


def transport_of(address: str, arguments: argparse.Namespace) -> Transport:
    """The transport to `address`, with what the arguments say of access."""
    from ..transports.choice import transport_to

    token = token_for(address, arguments.token_file)
    return transport_to(address, token=token, ca_file=arguments.ca_file)


def token_for(address: str, token_file: str | None) -> str | None:
    """As `read_token`; None for an actor, which needs none, unless a file was named."""
    return None if address.startswith("ray:") and token_file is None else read_token(token_file)


@contextlib.asynccontextmanager
async def server_of(arguments: argparse.Namespace) -> AsyncIterator[Transport]:
    """The transport to the server that the arguments name."""
    transport = transport_of(arguments.url, arguments)
    try:
        yield transport
    finally:
        await transport.close()


async def ask(transport: Transport, message: Message, timeout: float) -> Any:
    """The reply; `UnreachableError` where none comes."""
    from ..messages import ConnectionLost
    from ..transports.choice import nothing_answers

    try:
        return await transport.call(message, timeout)
    except ConnectionLost as lost:
        raise nothing_answers(transport.target, lost) from lost
