"""Shim (loop side, above the client): SkyRL's checkpoint and export folders.

Imports SkyRL's rule of which checkpoints to keep, remote_rl and what all shims share.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl.train.utils.trainer_utils import cleanup_old_checkpoints, list_checkpoint_dirs

from remote_rl import Session

from ..common.checkpoints import SavedFolders
from ..common.random_state import random_state, restore_random_state


class Checkpoints:
    """Saves and loads by the folder that SkyRL names; the weights stay on the server."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._folders = SavedFolders(
            session,
            framework="skyrl",
            remedy="set trainer.resume_mode=none, or give another trainer.resume_path",
        )

    def save(self, folder: str, step: int, schedule: Mapping[str, Any]) -> str:
        """Blocks until the server's checkpoint is complete; returns the server's name of it."""
        metadata = {"lr_schedule": dict(schedule), "random_state": random_state()}
        return self._folders.save(Path(folder), step, metadata)

    def load(
        self, folder: str, *, optimizer: bool = True, schedule: bool = True
    ) -> Mapping[str, Any] | None:
        """Loads what the folder names; returns the schedule's state, None unless asked for."""
        metadata = self._folders.load(Path(folder), optimizer=optimizer)
        restore_random_state(metadata["random_state"])
        state: Mapping[str, Any] | None = metadata["lr_schedule"] if schedule else None
        return state

    def clean(self, base: str, keep: int) -> None:
        """Removes what SkyRL's rule says (`trainer.max_ckpts_to_keep`), on the server too.

        base: `trainer.ckpt_path`.
        """
        policies = [Path(base) / name / "policy" for name in list_checkpoint_dirs(base)]
        held = {each: self._folders.manifest(each) for each in policies}
        cleanup_old_checkpoints(base, keep)
        for folder, manifest in held.items():
            if manifest is not None and not folder.exists():
                self._folders.delete(manifest["checkpoint"])

    def export(self, folder: str, tokenizer: Any) -> None:
        """A Hugging Face directory of the current weights, with the tokenizer, at `folder`.

        What is there already is replaced file by file only once the export has arrived.
        """
        name = f"skyrl-export-{uuid.uuid4().hex[:12]}"
        destination = Path(folder)
        arrived = destination.with_name(f"{destination.name}.{uuid.uuid4().hex[:12]}.half")
        self._session.training.export(name).result()
        self._session.download("export", name, arrived)
        self._session.training.delete(name, "export").result()
        destination.mkdir(parents=True, exist_ok=True)
        for each in arrived.iterdir():
            each.replace(destination / each.name)
        arrived.rmdir()
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
