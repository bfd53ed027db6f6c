"""Contract: what all requests have in common (imports errors and fields)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

import attrs

from ..errors import InvalidRequestError
from ..types.fields import (
    RESERVED,
    only_default,
    strict,
)

InFlight: TypeAlias = Literal["keep", "wait", "abort"]
Half: TypeAlias = Literal["training", "sampling"]
FileKind: TypeAlias = Literal["checkpoint", "export"]
#: (kind, name): what a backend must declare, e.g. ("loss", "PPO")
Requirement: TypeAlias = tuple[str, str]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
RESERVED_NAMES = frozenset({"base", "current", "reference"})


def check_name(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, str) or not _NAME.fullmatch(value) or value in RESERVED_NAMES:
        raise InvalidRequestError(
            f"{type(instance).__name__}.{attribute.name} can't be {value!r}: a name has 1 to 128 "
            "letters, digits, '.', '_' or '-', begins with a letter or digit, and is none of "
            f"{', '.join(sorted(RESERVED_NAMES))}",
            field=attribute.name,
        )


def check_policy(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value not in ("current", "reference"):
        check_name(instance, attribute, value)


def model_field() -> Any:
    return attrs.field(
        default="policy",
        metadata=RESERVED,
        validator=only_default("policy", "a run holds one model today"),
    )


@strict
@attrs.frozen(kw_only=True)
class Request:
    """Base of all requests."""

    def requirements(self) -> Iterator[Requirement]:
        """What the backend must declare besides the operation itself."""
        return iter(())
