"""Shim (loop side, above the client): every configuration key the shim knows, by its full path.

Imports the tables and the rules, which say how a table is read. Whatever has no rule in the
sections that say what runs remotely is refused by name at start-up (`config.check_keys`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..common.rules import Irrelevant, Only, Rule, Theirs, joined, under
from . import keys_actor, keys_rollout, keys_trainer
from .rules import CALLED

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
    under("data", (Theirs(), "continuous_token.*")),
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
