"""Client: from a target to a session
(imports the contract, registry and, when used, a transport)."""

from __future__ import annotations

import asyncio
import difflib
import inspect
import logging
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InvalidRequestError, LeaseError, ProtocolError, UnreachableError
from ..messages import Attach, ConnectionLost, Describe, Grant, Message, Occupied, Transport
from ..progress_line import ProgressLine
from ..protocol import PROTOCOL_VERSIONS
from ..run_info import RunInfo
from .connection import Connection
from .handle import Handle
from .loop import LoopThread
from .session import Session

if TYPE_CHECKING:
    from ..protocol import Backend

log = logging.getLogger("remote_rl.client")

_CONNECT_PATIENCE = 5.0
_STALL_TIMEOUT = 300.0
#: a run and its only client that live in one process end together, so no lease has to run out
_FOREVER = 1e9


def connect(
    target: str | Path | Handle | Mapping[str, Any] | Backend,
    *,
    model: str | None = None,
    start: str | None = None,
    takeover: bool = False,
    token: str | None = None,
    ca_file: str | None = None,
    checkpoint_dir: str | Path | None = None,
    stall_timeout: float | None = None,
    **options: Any,
) -> Session:
    """Opens a session.

    target: a backend's name ("mock") or object, which is then run inside this process; the address
    of a server ("http://host:port"); or a handle (`Handle`, its dict or JSON, or the path of a
    saved one), which attaches to a driver's run as a member.
    model: which model the run must have; another one is refused.
    start: "base", "current" or a checkpoint's name. Must be said where the run isn't pristine.
    takeover: revoke another driver's rights instead of waiting for its lease to run out.
    token, ca_file: for a server; the token defaults to the environment's REMOTE_RL_TOKEN.
    checkpoint_dir, stall_timeout (300 s), options: of a run inside this process; `options` are the
    backend's own.

    Raises `UnreachableError` where nothing answers for 5 s, `LeaseError` where another driver is
    alive, `InvalidRequestError` and its kin for what can't be.
    """
    for name, value in (("token", token), ("model", model), ("start", start), ("ca_file", ca_file)):
        if value is not None and not isinstance(value, str):
            raise InvalidRequestError(f"{name} must be a string, not {value!r}", field=name)
    if checkpoint_dir is not None and not isinstance(checkpoint_dir, (str, Path)):
        raise InvalidRequestError(
            f"checkpoint_dir must be a path, not {checkpoint_dir!r}", field="checkpoint_dir"
        )
    where = _place(target)
    if isinstance(where, (Handle, _Address)):
        local = {**options, "checkpoint_dir": checkpoint_dir, "stall_timeout": stall_timeout}
        given = [name for name, value in local.items() if name in options or value is not None]
        if given:
            raise InvalidRequestError(
                f"{given[0]}= is for a run in this process; a server has its own configuration"
                + _near_miss(given[0]),
                field=given[0],
            )
        return _open_remote(where, model, start, takeover, token, ca_file)
    given = [name for name, value in (("token", token), ("ca_file", ca_file)) if value is not None]
    given += ["takeover"] if takeover else []
    if given:
        raise InvalidRequestError(
            f"{given[0]}= is for a server; this run is inside this process", field=given[0]
        )
    patience = _STALL_TIMEOUT if stall_timeout is None else stall_timeout
    return _open_local(where, options, model, start, patience, checkpoint_dir)


def _near_miss(name: str) -> str:
    own = [parameter for parameter in inspect.signature(connect).parameters if parameter != name]
    close = difflib.get_close_matches(name, own, n=1, cutoff=0.6)
    return f"; or did you mean {close[0]!r}?" if close else ""


class _Address(str):
    """A server's base URL."""


def _place(target: Any) -> Handle | _Address | Any:
    if isinstance(target, (Handle, Mapping, Path)):
        return Handle.of(target)
    if isinstance(target, str):
        if target.startswith(("http://", "https://")):
            return _Address(target.rstrip("/"))
        if target.lstrip().startswith("{") or target.endswith(".json"):
            return Handle.of(target)
        if "://" in target:
            raise InvalidRequestError(
                f"{target!r} has an unknown scheme; a target is a backend's name, an http:// or "
                "https:// address, or a handle"
            )
        if ":" in target or "/" in target:
            raise InvalidRequestError(
                f"{target!r} is neither a backend's name nor an address; did you mean "
                f"'http://{target}'?",
                field="target",
            )
    elif isinstance(target, (int, float, bytes)) or target is None:
        raise InvalidRequestError(
            f"a target is a backend's name or object, an address or a handle, not {target!r}",
            field="target",
        )
    return target


def _open_local(
    target: Any,
    options: dict[str, Any],
    model: str | None,
    start: str | None,
    stall_timeout: float,
    checkpoint_dir: str | Path | None,
) -> Session:
    from ..dispatcher import Dispatcher
    from ..registry import create_backend
    from ..transports.inprocess import InProcessTransport

    if isinstance(target, str):
        backend = create_backend(target, options)
    elif options:
        raise InvalidRequestError("options are for a backend given by its name")
    elif not hasattr(target, "capabilities"):
        raise InvalidRequestError(
            f"{target!r} is no backend: it has none of what remote_rl.protocol.Backend asks for",
            field="target",
        )
    else:
        backend = target
    dispatcher = Dispatcher(
        backend,
        checkpoint_dir=checkpoint_dir,
        lease_seconds=_FOREVER,
        stall_timeout=stall_timeout,
    )
    loop = LoopThread()
    line = ProgressLine()
    try:
        loop.run(dispatcher.start(lambda what: line.show(f"remote_rl: starting, {what}")))
    except BaseException:
        loop.stop()
        raise
    finally:
        line.clear()
    transport = InProcessTransport(dispatcher)
    return _attach(transport, loop, _asked(model, start, False, None), None)


def _open_remote(
    where: Handle | _Address,
    model: str | None,
    start: str | None,
    takeover: bool,
    token: str | None,
    ca_file: str | None,
) -> Session:
    from ..transports.http import HttpTransport

    handle = where if isinstance(where, Handle) else None
    url = handle.url if handle is not None else str(where)
    if handle is not None and (start is not None or takeover):
        name = "start" if start is not None else "takeover"
        raise InvalidRequestError(
            f"{name}= is the driver's; a handle attaches a member. Connect to {url!r} to drive",
            field=name,
        )
    token = token if token is not None else os.environ.get("REMOTE_RL_TOKEN")
    transport = HttpTransport(url, token=token, ca_file=ca_file)
    return _attach(transport, LoopThread(), _asked(model, start, takeover, handle), url)


def _asked(model: str | None, start: str | None, takeover: bool, handle: Handle | None) -> Attach:
    return Attach(
        client_id=uuid.uuid4().hex,
        protocol_versions=PROTOCOL_VERSIONS,
        model=model,
        start=start,
        takeover=takeover,
        instance_id=None if handle is None else handle.instance_id,
        epoch=None if handle is None else handle.epoch,
    )


def _attach(transport: Transport, loop: LoopThread, asked: Attach, url: str | None) -> Session:
    try:
        grant = loop.run(_lease(transport, asked))
    except BaseException:
        loop.run(transport.close())
        loop.stop()
        raise
    session = Session(Connection(transport, loop, grant), loop, url)
    try:
        _begin(session, grant)
    except BaseException:
        session.detach()
        raise
    return session


def _begin(session: Session, grant: Grant) -> None:
    if grant.needs_start == "base":
        session.reset().result()
    elif grant.needs_start == "current":
        # an earlier driver's unapplied gradient is not this one's
        session.training.zero_grad().result()
    elif grant.needs_start is not None:
        session.training.load(grant.needs_start).result()


async def _lease(transport: Transport, asked: Attach) -> Grant:
    """The grant; while another driver's lease runs out it waits, and says so."""
    described: RunInfo = await _ask(transport, Describe())
    if not set(described.protocol_versions) & set(PROTOCOL_VERSIONS):
        raise ProtocolError(
            f"{transport.target} speaks protocol {list(described.protocol_versions)} and this "
            f"client {list(PROTOCOL_VERSIONS)}; install the same remote-rl on both sides"
        )
    line = ProgressLine()
    first: Occupied | None = None
    try:
        while True:
            answer = await _ask(transport, asked)
            if isinstance(answer, Grant):
                return answer
            if first is None:
                first = answer
                log.warning(
                    "another driver holds %s; waiting up to %.0f s for its lease to run out",
                    transport.target,
                    answer.remaining,
                )
            if answer.renewals != first.renewals:
                raise LeaseError(
                    f"another driver holds {transport.target} and is alive; end it, or connect "
                    "with takeover=True"
                )
            line.show(f"remote_rl: another driver's lease ends in {answer.remaining:.0f} s")
            await asyncio.sleep(min(1.0, answer.remaining + 0.05))
    finally:
        line.clear()


async def _ask(transport: Transport, message: Message) -> Any:
    """A reply within the patience of a connect, whatever is lost on the way."""
    end = time.monotonic() + _CONNECT_PATIENCE
    while True:
        left = end - time.monotonic()
        try:
            return await transport.call(message, max(0.1, left))
        except ConnectionLost as lost:
            if time.monotonic() + 0.1 >= end:
                raise UnreachableError(
                    f"nothing answers at {transport.target} ({lost}); is `remote-rl serve` "
                    "running there?"
                ) from lost
            await asyncio.sleep(0.1)
