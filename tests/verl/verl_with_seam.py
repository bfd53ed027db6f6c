"""Gives the installed verl what stock verl lacks, for the tests: `verl.remote_backend`.

Named in VERL_USE_EXTERNAL_MODULES before the shim, it makes the package under `seam/` a part of
verl in every process that imports verl. With VERL_SEAM_WITHOUT_V1=1 it also hides what came to
verl after the seam, as on its branch release/v0.7.1.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import verl

_LATER = ("verl.trainer.ppo.v1", "verl.workers.rollout.llm_server")


class _Without:
    """A finder of modules that finds none of the later ones."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.startswith(_LATER):
            return None
        return self._finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


def environment(*, without_v1: bool) -> dict[str, str]:
    """Variables of a process whose verl has the seam, and the shim registered there."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(each) for each in Path(__file__).parents[:2]),
        "VERL_USE_EXTERNAL_PLUGINS": "none",
        "VERL_USE_EXTERNAL_MODULES": "verl_with_seam,shims.verl.plugin",
        "VERL_SEAM_WITHOUT_V1": str(int(without_v1)),
    }


verl.__path__.append(str(Path(__file__).with_name("seam")))
if os.environ.get("VERL_SEAM_WITHOUT_V1") == "1":
    loaded = [name for name in sys.modules if name.startswith(_LATER)]
    assert not loaded, f"{loaded} were imported before they could be hidden"
    sys.meta_path[:] = [_Without(finder) for finder in sys.meta_path]
