"""Shim (loop side, above the client): verl's checkpoint folders, kept by the server.

Imports verl's retention rule, remote_rl and what all shims share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

from remote_rl import Session

from ..common.checkpoints import SavedFolders
from ..common.random_state import random_state, restore_random_state


class Checkpoints:
    """Saves and loads by verl's `local_path`.

    section: verl's `actor.checkpoint` configuration. random_state: whether `extra` holds the state
    of this process's torch too, as it does in verl; a loss that runs here may draw from it.
    """

    def __init__(self, session: Session, section: Any, *, random_state: bool = False) -> None:
        self._folders = SavedFolders(
            session,
            framework="verl",
            remedy="set trainer.resume_mode=disable or give another resume_from_path",
        )
        self._random_state = random_state
        self._save_contents = list(section.save_contents)
        self._load_contents = list(section.load_contents)
        self._retention = _Retention(self._forget)

    def save(
        self, local_path: str, global_step: int, keep: int | None, schedule: Mapping[str, Any]
    ) -> str:
        """Blocks until the server's checkpoint is complete, then writes the manifest; returns the
        server's name of it. An earlier checkpoint at the same path goes last."""
        self._retention.ensure_checkpoint_capacity(keep)
        metadata: dict[str, Any] = {}
        if "extra" in self._save_contents:
            metadata["lr_schedule"] = dict(schedule)
            if self._random_state:
                metadata["random_state"] = random_state()
        with_optimizer = "optimizer" in self._save_contents
        name = self._folders.save(Path(local_path), global_step, metadata, optimizer=with_optimizer)
        self._retention.register_checkpoint(local_path, keep)
        return name

    def load(self, local_path: str) -> Mapping[str, Any] | None:
        """Loads what the manifest names; returns the schedule's state, None where verl's
        `load_contents` or the checkpoint leaves it out."""
        with_optimizer = "optimizer" in self._load_contents
        metadata = self._folders.load(Path(local_path), optimizer=with_optimizer)
        if "extra" not in self._load_contents:
            return None
        state = metadata.get("random_state")
        if self._random_state and state is not None:
            restore_random_state(state)
        schedule: Mapping[str, Any] | None = metadata.get("lr_schedule")
        return schedule

    def _forget(self, local_path: str) -> None:
        self._folders.forget(Path(local_path))


class _Retention(BaseCheckpointManager):
    """verl's own rule of which saved paths to keep (`max_ckpt_to_keep`), with another way to
    remove one."""

    def __init__(self, forget: Callable[[str], None]) -> None:
        self.previous_saved_paths: list[str] = []
        self._forget = forget

    def remove_previous_save_local_path(self, path: str | list[str]) -> None:
        for each in [path] if isinstance(path, str) else path:
            self._forget(each)
