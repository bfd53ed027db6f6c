"""Shim (loop side, above the client): what can be said of one key of verl's configuration.

Imports attrs only. Every key that `keys.TABLE` knows has one of these rules; a key that it doesn't
know is refused by name at start-up (`config.check_keys`), so that nothing is silently ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import attrs

SYNC: Final = "sync"
SEPARATE_ASYNC: Final = "separate_async"


@attrs.frozen
class Mapped:
    """The shim translates it, every value or those that the note names.

    how: what becomes of it.
    """

    how: str


@attrs.frozen
class Verl:
    """verl itself acts on it, above the hooks that the shim fills, as with any engine."""


@attrs.frozen
class Irrelevant:
    """No value of it changes what is trained, sampled or saved here.

    because: why not.
    """

    because: str


@attrs.frozen
class Only:
    """Only these values can be honoured; any other is refused by the key's name.

    values: the legal ones, none where the key has to be left out. because: why no other is, and
    what to do.
    """

    values: tuple[Any, ...]
    because: str


@attrs.frozen
class Not:
    """Every value but these can be honoured. values and because: as in `Only`."""

    values: tuple[Any, ...]
    because: str


@attrs.frozen
class ByMode:
    """Another rule in each mode of verl's V1 trainer."""

    sync: Rule
    separate_async: Rule


Rule = Mapped | Verl | Irrelevant | Only | Not | ByMode


def in_mode(rule: Rule, mode: str) -> Rule:
    """The rule that holds in `mode`, "sync" or "separate_async"."""
    if isinstance(rule, ByMode):
        return rule.sync if mode == SYNC else rule.separate_async
    return rule


def under(section: str, *groups: tuple[Rule, str]) -> Iterable[tuple[str, Rule]]:
    """(path, rule) of the keys of a section, named in one string a rule."""
    for rule, names in groups:
        for name in names.split():
            yield f"{section}.{name}", rule


def joined(*parts: Iterable[tuple[str, Rule]]) -> dict[str, Rule]:
    """One table of several; a path that is named twice is an `AssertionError`."""
    table: dict[str, Rule] = {}
    for part in parts:
        for path, rule in part:
            assert path not in table, f"{path} has two rules"
            table[path] = rule
    return table


LAYOUT = Irrelevant(
    "it changes the speed and memory of an engine inside verl; the server's own configuration "
    "lays its engine out"
)
UNREAD = Irrelevant("verl's V1 trainer reads it nowhere, with any engine")
CALLED = Irrelevant("the class that verl builds the section with; set by verl")
FILLED = Only((), "verl fills it in at run time")
REMOTE_LAYOUT: Final = "the accelerators belong to the server, whose own configuration lays it out"
PRECISION: Final = (
    "the precision is the server's own configuration; set it there and leave this key alone"
)
