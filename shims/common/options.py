"""Shim (loop side, above the client): options of a shim inside a framework's configuration.

Imports attrs and remote_rl's errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

import attrs

from remote_rl import errors

MEANING: Final = "remote_rl.meaning"

T = TypeVar("T", bound=attrs.AttrsInstance)


def option(meaning: str, **arguments: Any) -> Any:
    """A field that a user may set; `meaning` is its row in the documentation."""
    return attrs.field(metadata={MEANING: meaning}, **arguments)


def public(options: type[attrs.AttrsInstance]) -> list[str]:
    """The options that a user may set."""
    return [field.name for field in attrs.fields(options) if MEANING in field.metadata]


def build(options: type[T], given: Mapping[str, Any], path: str) -> T:
    """`options` from what the configuration holds at `path`.

    Raises `InvalidRequestError`, which names the option by its full path.
    """
    known = [field.name for field in attrs.fields(options)]
    for name in given:
        if name not in known:
            raise errors.InvalidRequestError(
                f"{path}.{name} does not exist; {errors.nearest(str(name), public(options))}"
            )
    try:
        return options(**given)
    except errors.InvalidRequestError as error:
        raise errors.InvalidRequestError(
            f"{path}.{str(error).removeprefix(f'{options.__name__}.')}"
        ) from None
