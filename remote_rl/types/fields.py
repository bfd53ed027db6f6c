"""Contract: how a field of a typed request is declared, checked and classified (imports errors
only).

Every field of a class that crosses the protocol says what it is:

* SEMANTIC: it changes the result; a test shows a differing result for each.
* SCHEDULING: it may change when or where, never what; a test finds each in the mock's call log.
* RESERVED: today only its default is legal; anything else is refused by name.
* LOCAL: kept on the client, never sent.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import attrs
import numpy as np

from ..errors import InvalidRequestError, UnknownNameError, nearest

KIND = "remote_rl.kind"
SEMANTIC: Mapping[str, str] = MappingProxyType({KIND: "semantic"})
SCHEDULING: Mapping[str, str] = MappingProxyType({KIND: "scheduling"})
RESERVED: Mapping[str, str] = MappingProxyType({KIND: "reserved"})
LOCAL: Mapping[str, str] = MappingProxyType({KIND: "local"})

Class = TypeVar("Class", bound=type)
Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]


def strict(cls: Class) -> Class:
    """Class decorator: an unknown keyword is an `UnknownNameError` with the nearest valid name,
    a missing one an `InvalidRequestError`; stands above `attrs.frozen`."""
    original = cls.__init__  # type: ignore[misc]
    names = [field.alias or field.name for field in attrs.fields(cls) if field.init]
    required = {
        field.alias or field.name
        for field in attrs.fields(cls)
        if field.init and field.default is attrs.NOTHING
    }

    @functools.wraps(original)
    def checked(self: Any, *positional: Any, **named: Any) -> None:
        try:
            original(self, *positional, **named)
        except TypeError:  # looked into only now: this stands in the way of every object
            for name in named:
                if name not in names:
                    raise UnknownNameError(
                        f"{cls.__name__} has no field {name!r}; {nearest(name, names)}", field=name
                    ) from None
            missing = required.difference(named, names[: len(positional)])
            if missing:
                first = min(missing, key=names.index)
                raise InvalidRequestError(
                    f"{cls.__name__} needs {first!r}; pass {first}=...", field=first
                ) from None
            raise

    cls.__init__ = checked  # type: ignore[misc]
    return cls


#: of a caller's own values; those of all checkpoints travel in one answer
MOST_JSON_BYTES = 1 << 20
#: temperatures that float32 logits bear; 0, greedy, stands apart
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 1e-4, 1e4
TEMPERATURES = f"0 (greedy), or from {LOWEST_TEMPERATURE:g} to {HIGHEST_TEMPERATURE:g}"


def temperature() -> Validator:
    """0, or a number within the bounds."""

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not is_number(value) or not (
            value == 0 or LOWEST_TEMPERATURE <= value <= HIGHEST_TEMPERATURE
        ):
            refuse(instance, attribute, value, TEMPERATURES)

    return check


def refuse(instance: Any, attribute: attrs.Attribute[Any], value: Any, wanted: str) -> None:
    shown = repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    raise InvalidRequestError(
        f"{type(instance).__name__}.{attribute.name} must be {wanted}, not {shown}",
        field=attribute.name,
    )


def is_number(value: Any) -> bool:
    """A real number, Python's or numpy's, and not a bool."""
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def number(
    *,
    above: float | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
) -> Validator:
    """A finite real number within the bounds (`above` and `below` exclude the bound itself)."""
    bounds = [
        text
        for text, bound in (
            (f"> {above}", above),
            (f">= {minimum}", minimum),
            (f"<= {maximum}", maximum),
            (f"< {below}", below),
        )
        if bound is not None
    ]
    wanted = "a finite number" + (" " + " and ".join(bounds) if bounds else "")

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if (
            not is_number(value)
            or not math.isfinite(value)
            or (above is not None and value <= above)
            or (minimum is not None and value < minimum)
            or (maximum is not None and value > maximum)
            or (below is not None and value >= below)
        ):
            refuse(instance, attribute, value, wanted)

    return check


def integer(*, minimum: int | None = None, maximum: int | None = None) -> Validator:
    """A whole number (not a bool) within the bounds, both included."""
    wanted = "a whole number"
    if minimum is not None:
        wanted += f" >= {minimum}"
    if maximum is not None:
        wanted += f"{' and' if minimum is not None else ''} <= {maximum}"

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if (
            not whole
            or (minimum is not None and value < minimum)
            or (maximum is not None and value > maximum)
        ):
            refuse(instance, attribute, value, wanted)

    return check


def text(*, empty: bool = False) -> Validator:
    """A string, not empty unless said so."""

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not isinstance(value, str) or (not value and not empty):
            refuse(instance, attribute, value, "a string" if empty else "a non-empty string")

    return check


def flag() -> Validator:
    """True or False."""

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not isinstance(value, bool):
            refuse(instance, attribute, value, "True or False")

    return check


def one_of(choices: Collection[Any]) -> Validator:
    """One of the given values; a near miss gets the nearest."""
    choices = tuple(choices)  # so that what has no hash is refused like any other

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value not in choices:
            hint = nearest(str(value), map(str, choices))
            raise InvalidRequestError(
                f"{type(instance).__name__}.{attribute.name} can't be {value!r}; {hint}",
                field=attribute.name,
            )

    return check


def instance_of(*classes: type, wanted: str | None = None) -> Validator:
    """An instance of one of the classes."""
    named = wanted or " or ".join(f"a {each.__name__}" for each in classes)

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not isinstance(value, classes):
            refuse(instance, attribute, value, named)

    return check


def optional(validator: Validator) -> Validator:
    """None, or what `validator` accepts."""

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is not None:
            validator(instance, attribute, value)

    return check


def each(validator: Validator) -> Validator:
    """Every item of a tuple passes `validator`."""

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if isinstance(value, (str, Mapping)) or not isinstance(value, Collection):
            refuse(instance, attribute, value, "a sequence of values")
        for item in value:
            validator(instance, attribute, item)

    return check


def only_default(default: Any, hint: str) -> Validator:
    """A reserved field: any other value is refused, with `hint` as the reason."""

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is not default and (type(value) is not type(default) or value != default):
            raise InvalidRequestError(
                f"{type(instance).__name__}.{attribute.name}={value!r} is reserved: {hint}; "
                f"leave it at {default!r}",
                field=attribute.name,
            )

    return check


def as_tuple(value: Any) -> Any:
    """Converter: a list, tuple, set or array to a tuple of Python values; a bare string is one
    item."""
    if isinstance(value, (str, bytes)):
        return (value,)
    if isinstance(value, np.ndarray):
        return tuple(value.reshape(-1).tolist())
    if isinstance(value, Mapping) or not isinstance(value, Iterable):
        return value
    return tuple(map(plain, value))


def as_names(value: Any) -> Any:
    """Converter: a string or an iterable of strings to a frozenset of names."""
    if isinstance(value, str):
        return frozenset((value,))
    if not isinstance(value, Iterable):
        return value
    items = tuple(value)
    return frozenset(items) if all(isinstance(item, Hashable) for item in items) else items


def label() -> Validator:
    """What a caller names a delivery of weights by: a whole number, a string or None."""

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if isinstance(value, bool) or not (value is None or isinstance(value, (int, str))):
            refuse(instance, attribute, value, "a whole number, a string or None")

    return check


def plain(value: Any) -> Any:
    """Converter: a numpy scalar to the Python number it holds (so that it travels as JSON)."""
    return value.item() if isinstance(value, np.generic) else value


def json_mapping(value: Any) -> Any:
    """Converter: a mapping of names to JSON values, as a plain dict; None is empty. Tuples become
    lists and numpy scalars Python numbers, as they would be after a round trip."""
    return {} if value is None else _json(value)


def _json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _json(item) for name, item in value.items()}
    return [_json(item) for item in value] if isinstance(value, (list, tuple)) else plain(value)


def json_values() -> Validator:
    """A dict of strings to what JSON can hold, MOST_JSON_BYTES of text at most."""

    def problem(value: Any, place: str) -> str | None:
        if isinstance(value, dict):
            for name, item in value.items():
                if not isinstance(name, str):
                    return f"{place} has the key {name!r}, which is not a string"
                found = problem(item, f"{place}[{name!r}]")
                if found:
                    return found
        elif isinstance(value, list):
            for index, item in enumerate(value):
                found = problem(item, f"{place}[{index}]")
                if found:
                    return found
        elif not (value is None or isinstance(value, (str, int, float))):
            return f"{place} is a {type(value).__name__}"
        return None

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not isinstance(value, dict):
            refuse(instance, attribute, value, "a mapping of names to JSON values")
        found = problem(value, f"{type(instance).__name__}.{attribute.name}")
        if found:
            raise InvalidRequestError(
                f"{found}; it must hold JSON values (text, numbers, lists, mappings of names)",
                field=attribute.name,
            )
        # piece by piece: the whole text takes many times its size while it is put together
        size = sum(map(len, json.JSONEncoder().iterencode(value)))
        if size > MOST_JSON_BYTES:
            raise InvalidRequestError(
                f"{type(instance).__name__}.{attribute.name} has {size} bytes of JSON, more than "
                f"the {MOST_JSON_BYTES} that it may; keep what is large in a file of your own",
                field=attribute.name,
            )

    return check
