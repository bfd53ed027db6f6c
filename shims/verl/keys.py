"""Shim (loop side, above the client): every configuration key the shim knows, by its full path.

Imports the tables and the rules. A path that ends in ".*" speaks for everything below it that has
no rule of its own; a path with others below it is a section. Whatever has no rule in the sections
that say what runs remotely is refused by name at start-up (`config.check_keys`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from . import keys_actor, keys_rollout, keys_trainer
from .rules import CALLED, Irrelevant, Only, Rule, Verl, joined, under

_REPLAY: Final = "verl's Megatron engine alone reads it, and the server returns no routed experts"

#: what verl 0.9.0 has and 0.9.1 has no more
OLDER: Mapping[str, Rule] = joined(
    *(
        under(
            f"actor_rollout_ref.{part}.router_replay",
            (CALLED, "_target_"),
            (Only(("disabled",), _REPLAY), "mode"),
            (Irrelevant("of router_replay.mode, which is refused"), "record_file replay_file"),
        )
        for part in ("actor", "ref")
    ),
    under("data", (Verl(), "continuous_token.*")),
)

TABLE: Mapping[str, Rule] = joined(
    keys_actor.TABLE.items(),
    keys_rollout.TABLE.items(),
    keys_trainer.TABLE.items(),
    OLDER.items(),
)

#: sections where a key without a rule is refused; elsewhere it is the user's own, for verl or for
#: code that the user plugs into verl
CLOSED: Final = ("actor_rollout_ref", "algorithm")


def find(path: str, table: Mapping[str, Rule] = TABLE) -> Rule | None:
    """The rule of `path`: its own, else that of the nearest ".*" above it."""
    if path in table:
        return table[path]
    section = path
    while "." in section:
        section = section.rpartition(".")[0]
        if f"{section}.*" in table:
            return table[f"{section}.*"]
    return None


def sections(table: Mapping[str, Rule] = TABLE) -> frozenset[str]:
    """Every path that stands above rules."""
    found = set()
    for path in table:
        while "." in path:
            path = path.rpartition(".")[0]
            found.add(path)
    return frozenset(found)


def siblings(path: str, table: Mapping[str, Rule] = TABLE) -> list[str]:
    """The names known beside the last name of `path`."""
    section, _, _ = path.rpartition(".")
    below = [known[len(section) + 1 :] for known in table if known.startswith(f"{section}.")]
    return sorted({each.partition(".")[0] for each in below} - {"*"})


def plain(value: Any) -> Any:
    """`value` as a rule's values are written: lists as tuples."""
    return tuple(value) if isinstance(value, list) else value
