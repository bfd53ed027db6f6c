"""Contract: a Submit of values that are right at first sight (imports messages and requests)."""

from __future__ import annotations

import math
from typing import Any

import attrs

from .messages import PendingDigest, Submit
from .requests import Request

_FIELDS = tuple(field.name for field in attrs.fields(Submit))


def submit_of(values: dict[str, Any]) -> Submit:
    """`Submit(**values)`. Nearly every one is right at first sight, and is then made without the
    look of each field's own validator, which takes most of the time; any other is refused by the
    constructor as ever."""
    if not _right_at_sight(values):
        return Submit(**values)
    made = object.__new__(Submit)
    for name in _FIELDS:
        object.__setattr__(made, name, values[name])
    return made


def _right_at_sight(values: dict[str, Any]) -> bool:
    """Whether these are all fields, each of the very type and in the bounds that it must have. May
    say no to what the constructor takes, never yes to what it refuses or converts."""
    try:
        number, digest, deadline = values["number"], values["digest"], values["deadline"]
        before, linger, patience = values["generates_before"], values["linger"], values["patience"]
        return (
            len(values) == len(_FIELDS)
            and type(values["client_id"]) is type(values["instance_id"]) is str
            and type(values["operation"]) is str
            and bool(values["client_id"] and values["instance_id"] and values["operation"])
            and type(number) is int
            and 1 <= number <= 2**53
            and isinstance(values["request"], Request)
            and (
                digest is None
                or (type(digest) is str and digest != "")
                or isinstance(digest, PendingDigest)
            )
            and type(before) is int
            and before >= 0
            and (deadline is None or (type(deadline) is float and 0 < deadline < math.inf))
            and type(linger) is type(patience) is float
            and 0 <= linger <= 60
            and 0 <= patience <= 60
            and type(values["acknowledged"]) is tuple
            and {tuple}.issuperset(map(type, values["acknowledged"]))
        )
    except KeyError:
        return False
