"""The configuration pages of the shims, from the tables that the shims themselves read.

Imports attrs and the rules of all shims, no framework.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs

from shims.common.options import MEANING
from shims.common.rules import ByMode, Irrelevant, Mapped, Not, Only, Rule, Table, Theirs

#: (title, prefix of its keys)
Section = tuple[str, str]


def page(
    head: str,
    options: type[attrs.AttrsInstance],
    table: Table,
    sections: Sequence[Section],
    framework: str,
) -> str:
    """The whole page: keys of one section with the same rule share a row. head: what stands before
    the table of options."""
    parts = [head + "\n".join(_options(options)) + "\n"]
    left = dict(table)
    for title, prefix in sections:
        rows: dict[str, list[str]] = {}
        for path in [each for each in left if not prefix or each.startswith(f"{prefix}.")]:
            rows.setdefault(_said(left.pop(path), framework), []).append(_short(path, prefix))
        where = f"Under `{prefix}`.\n\n" if prefix else ""
        lines = [f"| {', '.join(names)} | {said} |" for said, names in rows.items()]
        parts.append(
            f"## {title}\n{where}| key | what becomes of it |\n|---|---|\n" + "\n".join(lines)
        )
    return "\n".join(parts).rstrip() + "\n"


def _said(rule: Rule, framework: str) -> str:
    match rule:
        case Mapped(how):
            return f"**mapped**: {how}"
        case Theirs():
            return f"**{framework}**"
        case Irrelevant(because):
            return f"**irrelevant**: {because}"
        case Only((), because):
            return f"**only** left out: {because}"
        case Only(values, because):
            return f"**only** {_code(values)}: {because}"
        case Not(values, because):
            return f"**not** {_code(values)}: {because}"
        case ByMode(rules):
            each = (f"{mode}: {_said(given, framework)}" for mode, given in rules.items())
            return ". ".join(each)


def _code(values: Iterable[Any]) -> str:
    return " or ".join(f"`{value!r}`" for value in values)


def _options(options: type[attrs.AttrsInstance]) -> Iterator[str]:
    required_first = sorted(
        attrs.fields(options), key=lambda each: each.default is not attrs.NOTHING
    )
    for field in required_first:
        if MEANING in field.metadata:
            yield (
                f"| `{field.name}` | {_kind(field)} | {_default(field)} "
                f"| {field.metadata[MEANING]} |"
            )


def _kind(field: attrs.Attribute[Any]) -> str:
    return str(field.type).replace(" | ", " or ")


def _default(field: attrs.Attribute[Any]) -> str:
    if field.default is attrs.NOTHING:
        return "(required)"
    if isinstance(field.default, attrs.Factory):  # type: ignore[arg-type]
        return f"`{field.default.factory()!r}`"
    return f"`{field.default!r}`"


def _short(path: str, prefix: str) -> str:
    return f"`{path.removeprefix(f'{prefix}.') if prefix else path}`"
