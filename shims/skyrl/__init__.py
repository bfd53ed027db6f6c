"""Shim (loop side, above the client): stock SkyRL over remote_rl.

Imports nothing of SkyRL until `main()` is called; the modules below import SkyRL, torch and
remote_rl, never backends. The data path: entrypoint -> trainer -> dispatch, sampler -> remote_rl
client. SkyRL's `trainer.override_entrypoint=shims.skyrl` calls `main()`; as a library, `entrypoint`
has the experiment, `trainer` the trainers, `dispatch` and `sampler` what they stand on.
"""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    """Runs the training that the command line describes, as SkyRL's own entry point does.

    Raises `ImportError`, naming what to install, without SkyRL.
    """
    found = importlib.util.find_spec("skyrl")
    if found is None or found.origin is None:  # no origin: a folder that has the name only
        raise ImportError(
            f'{__name__} needs skyrl, which is not installed here; pip install "remote-rl[skyrl]" '
            "on Python 3.12 or newer"
        )
    from .entrypoint import run

    run(sys.argv[1:])
