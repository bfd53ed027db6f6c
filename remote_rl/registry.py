"""Registry: backend names to what makes them, imported on first use (imports errors, protocol).

Backends announce themselves by an entry point of the group `remote_rl.backends`: a function that
takes the backend's options as keywords and returns an object of `protocol.Backend`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import InvalidRequestError, UnknownNameError, UnsupportedError, nearest
from .protocol import Backend

GROUP = "remote_rl.backends"

#: built-in names and what to install where their packages are missing
INSTALL_HINTS = {
    "mock": "pip install remote-rl",
    "arctic": "pip install 'remote-rl[arctic]'",
}


def backend_names() -> tuple[str, ...]:
    """The names that `connect` and `remote-rl serve` know here."""
    found = importlib.metadata.entry_points(group=GROUP)
    return tuple(sorted({point.name for point in found}))


def create_backend(name: str, options: dict[str, Any]) -> Backend:
    """A backend that has not been started.

    Raises `UnknownNameError` for a name nobody announces, `UnsupportedError` with the install line
    where its packages are missing, and whatever its constructor says of the options.
    """
    backend: Backend = _factory(name)(**options)
    return backend


def takes_model(name: str) -> bool:
    """Whether which model a backend has is its caller's to say: its factory has a parameter
    `model`."""
    return "model" in inspect.signature(_factory(name)).parameters


def _factory(name: str) -> Callable[..., Backend]:
    points = [point for point in importlib.metadata.entry_points(group=GROUP) if point.name == name]
    if not points:
        raise UnknownNameError(
            f"there is no backend {name!r}; {nearest(name, backend_names())}", field="target"
        )
    point = points[0]
    if point.name in INSTALL_HINTS and point.module.split(".")[0] in ("backends", "shims"):
        refuse_shadow(point.module.split(".")[0])
    try:
        factory: Callable[..., Backend] = point.load()
    except ImportError as error:
        hint = INSTALL_HINTS.get(name, "install what it needs")
        raise UnsupportedError(
            f"backend {name!r} can't be loaded here ({error}); {hint}"
        ) from error
    return factory


def refuse_shadow(package: str) -> None:
    """Raises where a folder of the user's own hides this distribution's top-level `package`."""
    specification = importlib.util.find_spec(package)
    if specification is None:
        raise UnsupportedError(
            f"the package {package!r} that comes with remote-rl is missing; reinstall remote-rl"
        )
    ours = Path(__file__).resolve().parent.parent
    places = [
        Path(place).resolve().parent for place in specification.submodule_search_locations or ()
    ]
    if ours not in places[:1]:
        where = specification.origin or ", ".join(map(str, places))
        raise InvalidRequestError(
            f"another package named {package!r} at {where} hides the one of remote-rl in {ours}; "
            "rename that folder, or run from elsewhere"
        )
