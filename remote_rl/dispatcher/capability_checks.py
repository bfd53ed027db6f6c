"""Dispatcher: whether a backend is what it says it is, asked once (imports the contract)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import InvalidRequestError, nearest
from ..losses import LOSSES
from ..ops import OPERATIONS
from ..protocol import Backend
from ..types.results import AdamW

#: what the dispatcher calls on every backend
_ALWAYS_CALLED = ("start", "close", "kill", "sampler_version")


def check_backend(backend: Backend) -> None:
    """Raises `InvalidRequestError` where a backend declares what doesn't exist, with the nearest
    name, or lacks the method of an operation that it declares."""
    declared = backend.capabilities
    _check_names(backend, "operation", declared.operations, OPERATIONS)
    _check_names(backend, "loss", declared.losses, (each.__name__ for each in LOSSES.values()))
    _check_names(backend, "optimizer", declared.optimizers, (AdamW.__name__,))
    for name in _ALWAYS_CALLED:
        if not callable(getattr(backend, name, None)):
            raise InvalidRequestError(
                f"backend {backend.name!r} has no method {name!r}, which every backend needs",
                field=name,
            )
    for name in sorted(declared.operations):
        face = OPERATIONS[name].face
        if face == "dispatcher":  # whatever the backend
            continue
        holder: Any = backend if face == "backend" else getattr(backend, face, None)
        if not callable(getattr(holder, name, None)):
            place = "it" if face == "backend" else f"its {face!r}"
            raise InvalidRequestError(
                f"backend {backend.name!r} declares the operation {name!r}, but {place} has no "
                "method of that name; write it, or leave the operation out of its capabilities",
                operation=name,
            )


def _check_names(
    backend: Backend, kind: str, declared: Iterable[str], valid: Iterable[str]
) -> None:
    known = set(valid)
    for name in sorted(set(declared) - known):
        raise InvalidRequestError(
            f"backend {backend.name!r} declares the {kind} {name!r}, which does not exist; "
            f"{nearest(name, known)}",
            option=name,
        )
