"""Testing: what is shipped for other people's tests of loops, backends and servers (imports
nothing until a name is used).

| name             | for                                                                      |
|------------------|--------------------------------------------------------------------------|
| `conformance`    | whoever writes a backend or a server: the suite that says if it is right |
| `MockServer`     | who tests a loop: the mock behind a real HTTP server in this process     |
| `fault`          | one failure of the mock on purpose                                       |
| `Faults`         | losses, duplicates, delays and cuts between client and run               |
| `CallLog`        | what reached the mock                                                    |
| `LoopbackServer` | any backend behind a real HTTP server in this process                    |

The fixtures are in `pytest_plugin`, which pytest loads by itself: docs/testing-your-loop.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import conformance
    from .call_log import CallLog
    from .faults import Faults
    from .loopback import LoopbackServer
    from .mock import MockServer, fault

__all__ = ["CallLog", "Faults", "LoopbackServer", "MockServer", "conformance", "fault"]

#: name -> (module, name in it; None where the module itself is meant), imported on first use
_ON_FIRST_USE: dict[str, tuple[str, str | None]] = {
    "CallLog": ("call_log", "CallLog"),
    "Faults": ("faults", "Faults"),
    "LoopbackServer": ("loopback", "LoopbackServer"),
    "MockServer": ("mock", "MockServer"),
    "conformance": ("conformance", None),
    "fault": ("mock", "fault"),
}


def __getattr__(name: str) -> Any:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module 'remote_rl.testing' has no attribute {name!r}")
    import importlib

    place, attribute = _ON_FIRST_USE[name]
    module = importlib.import_module(f".{place}", __name__)
    value = globals()[name] = module if attribute is None else getattr(module, attribute)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
