"""Contract: the fields that results and receipts have in common (imports attrs, errors, fields)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from .fields import Validator, instance_of, integer, json_mapping, json_values, plain, refuse


def as_float(value: Any) -> Any:
    """Converter: any real number, also one in an array or tensor of one element, to a float; what
    is none stays as it is, for `real` to refuse."""
    if isinstance(value, (str, bytes, bool)):
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def real() -> Validator:
    """A float, NaN and infinity too: what an engine computed."""
    return instance_of(float, wanted="a number")


def as_metrics(value: Any) -> Any:
    """Converter: a mapping of names to numbers, as a plain dict of floats."""
    if not isinstance(value, Mapping):
        return value
    return {name: as_float(item) for name, item in value.items()}


def metrics() -> Validator:
    """A dict of names to numbers."""

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        good = isinstance(value, dict) and all(
            isinstance(name, str) and isinstance(item, float) for name, item in value.items()
        )
        if not good:
            refuse(instance, attribute, value, "a mapping of names to numbers")

    return check


def named() -> Validator:
    """A mapping of names to anything."""

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            refuse(instance, attribute, value, "a mapping of names")

    return check


def named_counts() -> Validator:
    """A mapping of names to whole numbers, 0 or more."""

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not isinstance(value, Mapping) or not all(
            isinstance(name, str) and type(count) is int and count >= 0
            for name, count in value.items()
        ):
            refuse(instance, attribute, value, "a mapping of names to whole numbers")

    return check


def version_field() -> Any:
    """Of the weights; they rise from 0."""
    return attrs.field(converter=plain, validator=integer(minimum=0))


def size_field(**default: Any) -> Any:
    """A whole number, 0 or more."""
    return attrs.field(**default, converter=plain, validator=integer(minimum=0))


def metrics_field() -> Any:
    """Names to numbers, none by default."""
    return attrs.field(factory=dict, converter=as_metrics, validator=metrics())


def metadata_field() -> Any:
    """The caller's own JSON values."""
    return attrs.field(factory=dict, converter=json_mapping, validator=json_values())
