"""Client: from a target to a session
(imports the contract, registry and, when used, a transport)."""

from __future__ import annotations

import asyncio
import difflib
import inspect
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InvalidRequestError, LeaseError, ProtocolError
from ..messages import Attach, ConnectionLost, Describe, Grant, Message, Occupied, Transport
from ..progress_line import ProgressLine
from ..protocol import PROTOCOL_VERSIONS
from ..run_info import RunInfo
from ..transports.choice import is_address, nothing_answers, transport_to
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

#: from the transport that a target leads to, to the one that is used
Wrap = Callable[[Transport], Transport]


def connect(
    target: str | Path | Handle | Mapping[str, Any] | Backend,
    *,
    model: str | Path | Mapping[str, Any] | None = None,
    start: str | None = None,
    takeover: bool = False,
    token: str | None = None,
    ca_file: str | None = None,
    checkpoint_dir: str | Path | None = None,
    stall_timeout: float | None = None,
    wrap_transport: Wrap | None = None,
    **options: Any,
) -> Session:
    """Opens a session.

    target: a backend's name ("mock") or object, which is then run inside this process; the address
    of a server ("http://host:port") or of an actor in this process's Ray cluster, or in that of
    RAY_ADDRESS ("ray:NAME", "ray:NAMESPACE/NAME"); or a handle (`Handle`, its dict or JSON, or the
    path of a saved one), which attaches to a driver's run as a member.
    model: which model the run must have; another one is refused. A backend inside this process that
    can have any, such as "arctic", is made with it: a path, or its options.
    start: "base", "current" or a checkpoint's name. Must be said where the run isn't pristine.
    takeover: revoke another driver's rights instead of waiting for its lease to run out.
    token, ca_file: for an http address; the token defaults to the environment's REMOTE_RL_TOKEN.
    checkpoint_dir, stall_timeout (300 s), options: of a run inside this process; `options` are the
    backend's own.
    wrap_transport: wraps the transport that the target leads to, for tests and tracing, such as
    `remote_rl.testing.faults.Faults(...).wrap`.

    Raises `UnreachableError` where nothing answers for 5 s, or no actor has the name, `LeaseError`
    where another driver is alive, `InvalidRequestError` and its kin for what can't be.
    """
    for name, value in (("token", token), ("start", start), ("ca_file", ca_file)):
        if value is not None and not isinstance(value, str):
            raise InvalidRequestError(f"{name} must be a string, not {value!r}", field=name)
    if checkpoint_dir is not None and not isinstance(checkpoint_dir, (str, Path)):
        raise InvalidRequestError(
            f"checkpoint_dir must be a path, not {checkpoint_dir!r}", field="checkpoint_dir"
        )
    if wrap_transport is not None and not callable(wrap_transport):
        raise InvalidRequestError(
            "wrap_transport must be a function that takes a transport and returns one, such as "
            f"Faults(...).wrap, not a {type(wrap_transport).__name__}",
            field="wrap_transport",
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
        return _open_remote(where, model, start, takeover, token, ca_file, wrap_transport)
    given = [name for name, value in (("token", token), ("ca_file", ca_file)) if value is not None]
    given += ["takeover"] if takeover else []
    if given:
        raise InvalidRequestError(
            f"{given[0]}= is for a server; this run is inside this process", field=given[0]
        )
    patience = _STALL_TIMEOUT if stall_timeout is None else stall_timeout
    return _open_local(where, options, model, start, patience, checkpoint_dir, wrap_transport)


def _near_miss(name: str) -> str:
    own = [parameter for parameter in inspect.signature(connect).parameters if parameter != name]
    close = difflib.get_close_matches(name, own, n=1, cutoff=0.6)
    return f"; or did you mean {close[0]!r}?" if close else ""


class _Address(str):
    """Of a server or an actor."""


def _place(target: Any) -> Handle | _Address | Any:
    if isinstance(target, (Handle, Mapping, Path)):
        return Handle.of(target)
    if isinstance(target, str):
        if is_address(target):
            return _Address(target.rstrip("/"))
        if target.lstrip().startswith("{") or target.endswith(".json"):
            return Handle.of(target)
        if "://" in target:
            raise InvalidRequestError(
                f"{target!r} has an unknown scheme; a target is a backend's name, an http:// or "
                "https:// address, ray:NAME, or a handle"
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
    model: Any,
    start: str | None,
    stall_timeout: float,
    checkpoint_dir: str | Path | None,
    wrap: Wrap | None,
) -> Session:
    from ..dispatcher import Dispatcher
    from ..registry import create_backend, takes_model
    from ..transports.inprocess import InProcessTransport

    if isinstance(target, str) and model is not None and takes_model(target):
        options, model = {**options, "model": model}, None
    asked = _asked(model, start, False, None)
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
    return _attach(transport, wrap, loop, asked, None)


def _open_remote(
    where: Handle | _Address,
    model: Any,
    start: str | None,
    takeover: bool,
    token: str | None,
    ca_file: str | None,
    wrap: Wrap | None,
) -> Session:
    handle = where if isinstance(where, Handle) else None
    url = handle.url if handle is not None else str(where)
    if handle is not None and (start is not None or takeover):
        name = "start" if start is not None else "takeover"
        raise InvalidRequestError(
            f"{name}= is the driver's; a handle attaches a member. Connect to {url!r} to drive",
            field=name,
        )
    transport = transport_to(url, token=token, ca_file=ca_file)
    asked = _asked(model, start, takeover, handle)
    return _attach(transport, wrap, LoopThread(), asked, url)


def _asked(model: Any, start: str | None, takeover: bool, handle: Handle | None) -> Attach:
    if model is not None and not isinstance(model, str):
        raise InvalidRequestError(
            f"model must be a string, the name of the run's model, not {model!r}", field="model"
        )
    return Attach(
        client_id=uuid.uuid4().hex,
        protocol_versions=PROTOCOL_VERSIONS,
        model=model,
        start=start,
        takeover=takeover,
        instance_id=None if handle is None else handle.instance_id,
        epoch=None if handle is None else handle.epoch,
    )


def _attach(
    transport: Transport, wrap: Wrap | None, loop: LoopThread, asked: Attach, url: str | None
) -> Session:
    try:
        if wrap is not None:
            transport = _checked_transport(wrap(transport))
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


def _checked_transport(wrapped: Any) -> Transport:
    for name in ("target", "submits", "call", "digest", "close"):
        if not hasattr(wrapped, name):
            raise InvalidRequestError(
                f"wrap_transport returned {wrapped!r}, which has no {name!r}; it must return what "
                "remote_rl.messages.Transport asks for",
                field="wrap_transport",
            )
    transport: Transport = wrapped
    return transport


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
            if lost.ended or time.monotonic() + 0.1 >= end:
                raise nothing_answers(transport.target, lost) from lost
            await asyncio.sleep(0.1)
