"""Shim (loop side, above the client): what can be said of one key of a framework's configuration.

Imports attrs and remote_rl's errors. Every key that a shim's table knows has one of these rules; a
key that it doesn't know is refused by name at start-up, so that nothing is silently ignored. A path
of a table that ends in ".*" speaks for everything below it that has no rule of its own; a path with
others below it is a section.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import attrs

from remote_rl import errors

#: what the shims call themselves in messages
NAME: Final = "remote_rl"


@attrs.frozen
class Mapped:
    """The shim translates it, every value or those that the note names.

    how: what becomes of it.
    """

    how: str


@attrs.frozen
class Theirs:
    """The framework itself acts on it, above the hooks that the shim fills, as with any engine."""


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
    """Another rule in each of the framework's modes.

    rules: mode to rule, e.g. of verl's "sync" and "separate_async".
    """

    rules: Mapping[str, Rule]


Rule = Mapped | Theirs | Irrelevant | Only | Not | ByMode
Table = Mapping[str, Rule]


@attrs.frozen
class Refusal:
    """path=value can't be honoured, because `because`."""

    path: str
    value: Any
    because: str

    def __str__(self) -> str:
        return f"{self.path}={self.value!r} is not supported with {NAME}: {self.because}"


def refuse(path: str, value: Any, because: str) -> None:
    """Raises `UnsupportedError` that names the framework's key."""
    raise errors.UnsupportedError(str(Refusal(path, value, because)), key=path)


def refuse_values(
    leaves: Iterable[tuple[str, Callable[[], Any]]], table: Table, mode: str = ""
) -> None:
    """Refuses values that can't be honoured, all of them in one `UnsupportedError`.

    leaves: (path, how to read its value) of what the configuration holds. mode: for `ByMode`.
    """
    refusals = list(_refusals(leaves, table, mode))
    if refusals:
        first, others = refusals[0], refusals[1:]
        also = "".join(f"; also {each}" for each in others)
        raise errors.UnsupportedError(f"{first}{also}", key=first.path)


def _refusals(
    leaves: Iterable[tuple[str, Callable[[], Any]]], table: Table, mode: str
) -> Iterator[Refusal]:
    for path, read in leaves:
        rule = find(path, table)
        rule = None if rule is None else in_mode(rule, mode)
        if not isinstance(rule, (Only, Not)):
            continue
        value = read()
        if (plain(value) in rule.values) is isinstance(rule, Only):
            continue
        advice = ""
        if isinstance(rule, Only):
            legal = " or ".join(map(repr, rule.values))
            advice = f"; set it to {legal}" if legal else "; leave it out"
        yield Refusal(path, value, rule.because + advice)


def refuse_unknown(path: str, table: Table) -> None:
    """Refuses a key without a rule, naming the nearest that has one beside it."""
    raise errors.UnsupportedError(
        f"{path} is not known to {NAME}; "
        f"{errors.nearest(path.rpartition('.')[2], siblings(path, table))}, or leave it out",
        key=path,
    )


def in_mode(rule: Rule, mode: str) -> Rule:
    """The rule that holds in `mode`."""
    return rule.rules[mode] if isinstance(rule, ByMode) else rule


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


def find(path: str, table: Table) -> Rule | None:
    """The rule of `path`: its own, else that of the nearest ".*" above it."""
    if path in table:
        return table[path]
    section = path
    while "." in section:
        section = section.rpartition(".")[0]
        if f"{section}.*" in table:
            return table[f"{section}.*"]
    return None


def sections(table: Table) -> frozenset[str]:
    """Every path that stands above rules."""
    found = set()
    for path in table:
        while "." in path:
            path = path.rpartition(".")[0]
            found.add(path)
    return frozenset(found)


def siblings(path: str, table: Table) -> list[str]:
    """The names known beside the last name of `path`."""
    section, _, _ = path.rpartition(".")
    below = [known[len(section) + 1 :] for known in table if known.startswith(f"{section}.")]
    return sorted({each.partition(".")[0] for each in below} - {"*"})


def plain(value: Any) -> Any:
    """`value` as a rule's values are written: lists as tuples."""
    return tuple(value) if isinstance(value, list) else value
