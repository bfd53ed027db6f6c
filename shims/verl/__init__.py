"""Shim (loop side, above the client): stock verl's V1 trainer over remote_rl.

Imports nothing of verl until `register()` is called; the modules below import verl, torch, ray and
remote_rl, never backends. The data path: trainer (driver) -> worker, llm_client, replica (members)
-> remote_rl client.
"""

from __future__ import annotations

#: what `trainer.v1.trainer_mode`, `actor_rollout_ref.rollout.name` and the key under
#: `actor_rollout_ref.rollout.engine_kwargs` are called
NAME = "remote_rl"


def register() -> None:
    """Adds the trainer mode and the rollout `remote_rl` to verl's registries; may be repeated.

    Raises `ImportError`, naming what to install, where verl's V1 trainer can't be imported.
    """
    from .registration import register as register_in_verl

    register_in_verl()
