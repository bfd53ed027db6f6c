"""Shim (loop side, above the client): stock verl's V1 trainer over remote_rl.

Imports nothing of verl until `register()` is called; the modules below import verl, torch, ray and
remote_rl, never backends. The data path: trainer (driver) -> worker, llm_client, replica (members)
-> remote_rl client.

Three ways to register it, all the same afterwards: installing remote-rl (entry point
`verl.plugins`), `VERL_USE_EXTERNAL_MODULES=shims.verl`, and `shims.verl.register()`.
"""

from __future__ import annotations

import importlib.util
import os

#: what `trainer.v1.trainer_mode`, `actor_rollout_ref.rollout.name` and the key under
#: `actor_rollout_ref.rollout.engine_kwargs` are called
NAME = "remote_rl"
#: `trainer.v1.trainer_mode` of the asynchronous trainer, whose section is verl's own
#: `trainer.v1.separate_async`
ASYNC_NAME = f"{NAME}_separate_async"

#: verl's own: modules to import wherever verl is imported, separated by commas
_MODULES = "VERL_USE_EXTERNAL_MODULES"


def register() -> None:
    """Adds the trainer modes `remote_rl` and `remote_rl_separate_async`, and the rollout and the
    checkpoint engine `remote_rl`, to verl's registries; may be repeated.

    Also names this package in this process's VERL_USE_EXTERNAL_MODULES, so that the workers of a
    Ray cluster that is started from here register it too.
    Raises `ImportError`, naming what to install, where verl's trainer can't be imported.
    """
    from .registration import register as register_in_verl

    register_in_verl()
    modules = [each for each in os.environ.get(_MODULES, "").split(",") if each]
    if __name__ not in modules:
        os.environ[_MODULES] = ",".join([*modules, __name__])


def _refuse_without_verl() -> None:
    found = importlib.util.find_spec("verl")
    if found is None or found.origin is None:  # no origin: a folder that has the name only
        raise ImportError(
            f'{__name__} needs verl, which is not installed here; pip install "remote-rl[verl]"'
        )


_refuse_without_verl()
if __name__ in os.environ.get(_MODULES, "").split(","):
    # verl imports what the variable names and calls nothing
    from .registration import register_loudly

    register_loudly()
