"""How a field is shown to matter: the same measurement with two values of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
from client_support import SessionFactory, small_mock

from remote_rl import Session
from remote_rl.errors import RemoteRLError


@attrs.frozen
class Lab:
    """A new run of its own for each measurement."""

    rl: Session
    backend: Any


@attrs.frozen
class Proof:
    """measure(lab, one) is the same twice, measure(lab, other) is not. options: of the mock."""

    measure: Callable[[Lab, Any], Any]
    one: Any
    other: Any
    options: Mapping[str, Any] = attrs.field(factory=dict)


def check(proof: Proof, session_factory: SessionFactory, folder: Any) -> None:
    """Measures three times, each in a new run."""
    results = []
    for number, value in enumerate((proof.one, proof.one, proof.other)):
        backend = small_mock(**proof.options)
        rl = session_factory(backend, checkpoint_dir=folder / str(number))
        results.append(proof.measure(Lab(rl, backend), value))
        rl.detach()
    assert repr(results[0]) == repr(results[1])
    assert repr(results[0]) != repr(results[2])


def outcome(operation: Any) -> Any:
    """The result, or the error's class and words."""
    try:
        return operation.result(60)
    except RemoteRLError as error:
        return type(error).__name__, str(error)


def until_started(lab: Lab, operation: str) -> None:
    """Until the backend's log says that one has begun."""
    for _ in range(2000):
        if any(call.operation == operation for call in lab.backend.calls):
            return
        lab.rl.info().result()
    raise AssertionError(f"no {operation} has reached the backend")
