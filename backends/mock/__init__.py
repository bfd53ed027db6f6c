"""Mock backend: the reference implementation of the protocol, in numpy and in memory.

`create` is the entry point `mock` of the group `remote_rl.backends`; it imports the rest when it
is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import MockBackend

__all__ = ["create"]


def create(**options: Any) -> MockBackend:
    """A backend that has not been started; options are the fields of `config.MockConfig`.

    Raises `UnknownNameError` for an option that does not exist, with the nearest that does, and
    `InvalidRequestError` for a value out of range.
    """
    from .backend import MockBackend
    from .config import MockConfig

    return MockBackend(MockConfig(**options))
