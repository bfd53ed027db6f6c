"""Every field of every class that travels in a request, and what kind it is."""

from __future__ import annotations

import re

import attrs

from remote_rl.losses import LOSSES
from remote_rl.ops import OPERATIONS
from remote_rl.requests import Request
from remote_rl.types.fields import KIND
from remote_rl.wire.vocabulary import wire_classes

KINDS = ("semantic", "scheduling", "reserved", "local")


def travelling_classes() -> list[type]:
    """The request classes of the table and all typed classes that their fields hold."""
    named = wire_classes()
    found: dict[str, type] = {}
    todo: list[type] = [row.request for row in OPERATIONS.values()]
    while todo:
        one = todo.pop()
        if one.__name__ in found:
            continue
        found[one.__name__] = one
        for field in attrs.fields(one):
            for word in re.findall(r"\w+", str(field.type)):  # annotations are text
                if word == "Loss":
                    todo += LOSSES.values()
                elif word in named and word != "Ragged":  # rows of numbers, not a set of fields
                    todo.append(named[word])
    return sorted(found.values(), key=lambda each: each.__name__)


def fields_of_kind(kind: str) -> list[str]:
    """ "Class.field" of each, sorted; inherited ones under each class that has them."""
    return sorted(
        f"{one.__name__}.{field.name}"
        for one in travelling_classes()
        for field in attrs.fields(one)
        if field.metadata.get(KIND) == kind
    )


def unclassified_fields() -> list[str]:
    """Those that say nothing of themselves."""
    return sorted(
        f"{one.__name__}.{field.name}"
        for one in travelling_classes()
        for field in attrs.fields(one)
        if field.metadata.get(KIND) not in KINDS
    )


def request_classes() -> dict[str, type[Request]]:
    """Name of the class to the class, of every request."""
    return {row.request.__name__: row.request for row in OPERATIONS.values()}
