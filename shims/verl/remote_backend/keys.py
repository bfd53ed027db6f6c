"""Shim (loop side, above the client): keys of the verl that has the seam.

Imports the shim's own tables, which are those of 0.9.1; these are of branch `release/v0.7.1`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...common.rules import Only, Rule, Theirs
from .. import keys
from ..rules import LAYOUT

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_REPLAY = "the server returns no routed experts"

#: as `shims.verl.keys.TABLE`
TABLE: Mapping[str, Rule] = {
    **keys.TABLE,
    f"{_ACTOR}.router_replay.mode": Only(("disabled",), _REPLAY),
    f"{_ACTOR}.router_replay.*": LAYOUT,
    f"{_ACTOR}.sum_pi_squared_checkpointing": Only(
        (False,), "no backend declares the output sum_pi_squared"
    ),
    f"{_ACTOR}.checkpoint.mbridge_config.*": LAYOUT,
    "actor_rollout_ref.ref.router_replay.mode": Only(("disabled",), _REPLAY),
    "actor_rollout_ref.ref.router_replay.*": LAYOUT,
    f"{_ROLLOUT}.skip_rollout": Only((False,), "it trains on rollouts of another run"),
    f"{_ROLLOUT}.skip_dump_dir": LAYOUT,
    f"{_ROLLOUT}.multi_turn.interaction_config_path": Theirs(),
    "trainer.remote_backend": Theirs(),
    "trainer.v1.trainer_mode": Only(("sync",), "the seam's trainer is a synchronous one"),
    "trainer.use_legacy_worker_impl": Only(
        ("disable",), "with other values verl starts its own worker instead of the backend's"
    ),
}
