"""The page docs/verl-configuration.md, from the shim's own tables; run as a program, it writes it.

python tests/verl/configuration_page.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs

from shims.verl.keys import TABLE
from shims.verl.options import MEANING, PATH, Options
from shims.verl.rules import (
    SEPARATE_ASYNC,
    SYNC,
    ByMode,
    Irrelevant,
    Mapped,
    Not,
    Only,
    Rule,
    Verl,
)

PAGE = Path(__file__).parents[2] / "docs" / "verl-configuration.md"

HEAD = """\
# verl's configuration, key by key

What becomes of every key of verl 0.9.1's configuration where [the shim](verl.md) trains. \
`python tests/verl/configuration_page.py` writes this page from the tables that the shim itself \
reads (`shims/verl/keys.py`); one test compares the two, others compare the tables with verl's own \
YAML and dataclasses, so that a key that verl adds or drops is noticed.

* **mapped**: the shim carries it over.
* **verl**: verl itself acts on it, as with any engine.
* **irrelevant**: no value of it changes what is trained, sampled or saved here.
* **only** and **not**: every other value, or these values, are refused at start-up by the key's \
own name, all in one error.

A key of `actor_rollout_ref` or `algorithm` that has no row is refused too. Elsewhere it is your \
own, for code that you plug into verl; so are keys of `algorithm` with an advantage estimator that \
you registered.
"""

OPTIONS = f"""\
## Options of the shim
Under `{PATH}`, on the command line with a `+`: `+{PATH}.url=http://127.0.0.1:7700`. verl hands \
`engine_kwargs` on as it is, so no schema has to be registered and no `hydra.searchpath` set. \
Types are checked, and an unknown option is refused with the nearest one.

| option | type | default | meaning |
|---|---|---|---|
"""

#: sections of the page: (title, prefixes of its keys)
SECTIONS = (
    ("Actor", ("actor_rollout_ref.actor",)),
    ("Reference", ("actor_rollout_ref.ref",)),
    ("Rollout", ("actor_rollout_ref.rollout",)),
    ("Model", ("actor_rollout_ref.model",)),
    ("Algorithm", ("algorithm",)),
    ("Trainer", ("trainer",)),
    ("Data", ("data",)),
    ("The rest", ("",)),
)


def _code(values: Iterable[Any]) -> str:
    return " or ".join(f"`{value!r}`" for value in values)


def _said(rule: Rule) -> str:
    match rule:
        case Mapped(how):
            return f"**mapped**: {how}"
        case Verl():
            return "**verl**"
        case Irrelevant(because):
            return f"**irrelevant**: {because}"
        case Only((), because):
            return f"**only** left out: {because}"
        case Only(values, because):
            return f"**only** {_code(values)}: {because}"
        case Not(values, because):
            return f"**not** {_code(values)}: {because}"
        case ByMode(sync, separate_async):
            return f"{SYNC}: {_said(sync)}. {SEPARATE_ASYNC}: {_said(separate_async)}"


def _options() -> Iterator[str]:
    for field in attrs.fields(Options):
        if MEANING in field.metadata:
            default = "(required)" if field.default is attrs.NOTHING else f"`{field.default!r}`"
            kind = str(field.type).replace(" | ", " or ")
            yield f"| `{field.name}` | {kind} | {default} | {field.metadata[MEANING]} |"


def page() -> str:
    """The whole page: keys of one section with the same rule share a row."""
    parts = [HEAD, OPTIONS + "\n".join(_options()) + "\n"]
    left = dict(TABLE)
    for title, prefixes in SECTIONS:
        rows: dict[str, list[str]] = {}
        for path in [each for each in left if not prefixes[0] or _below(each, prefixes)]:
            rows.setdefault(_said(left.pop(path)), []).append(_short(path, prefixes[0]))
        where = f"Under `{prefixes[0]}`.\n\n" if prefixes[0] else ""
        lines = [f"| {', '.join(names)} | {said} |" for said, names in rows.items()]
        parts.append(
            f"## {title}\n{where}| key | what becomes of it |\n|---|---|\n" + "\n".join(lines)
        )
    return "\n".join(parts).rstrip() + "\n"


def _below(path: str, prefixes: Iterable[str]) -> bool:
    return any(path.startswith(f"{prefix}.") for prefix in prefixes)


def _short(path: str, prefix: str) -> str:
    return f"`{path.removeprefix(f'{prefix}.') if prefix else path}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
