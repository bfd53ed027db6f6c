"""Shim (loop side, above the client): verl's checkpoint folders, kept by the server.

Imports torch, verl's retention rule and remote_rl. The weights stay in the server's checkpoint_dir,
which may be another file system; a small manifest under verl's `local_path` names them.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

from remote_rl import Session, errors

MANIFEST = "remote_rl.json"
_FORMAT = 1


class Checkpoints:
    """Saves and loads by verl's `local_path`.

    section: verl's `actor.checkpoint` configuration. random_state: whether `extra` holds the state
    of this process's torch too, as it does in verl; a loss that runs here may draw from it.
    """

    def __init__(self, session: Session, section: Any, *, random_state: bool = False) -> None:
        self._session = session
        self._random_state = random_state
        self._save_contents = list(section.save_contents)
        self._load_contents = list(section.load_contents)
        self._retention = _Retention(self._forget)

    def save(
        self, local_path: str, global_step: int, keep: int | None, schedule: Mapping[str, Any]
    ) -> str:
        """Blocks until the server's checkpoint is complete, then writes the manifest; returns the
        server's name of it. An earlier checkpoint at the same path goes last."""
        folder = Path(local_path)
        replaced = _read(folder)
        self._retention.ensure_checkpoint_capacity(keep)
        name = f"verl-global_step_{global_step}-{uuid.uuid4().hex[:12]}"
        metadata: dict[str, Any] = {"framework": "verl", "global_step": global_step}
        if "extra" in self._save_contents:
            metadata["lr_schedule"] = dict(schedule)
            if self._random_state:
                state = torch.get_rng_state().numpy().tobytes()
                metadata["random_state"] = base64.b64encode(state).decode("ascii")
        with_optimizer = "optimizer" in self._save_contents
        self._session.training.save(name, metadata=metadata, optimizer=with_optimizer).result()
        _write(folder, {"checkpoint": name, "global_step": global_step})
        if replaced is not None:
            self._delete(replaced["checkpoint"])
        self._retention.register_checkpoint(local_path, keep)
        return name

    def load(self, local_path: str) -> Mapping[str, Any] | None:
        """Loads what the manifest names; returns the schedule's state, None where verl's
        `load_contents` or the checkpoint leaves it out."""
        manifest = _read(Path(local_path))
        if manifest is None:
            raise errors.InvalidRequestError(
                f"{local_path} holds no {MANIFEST}, so it was not saved by trainer mode "
                "remote_rl; set trainer.resume_mode=disable or give another resume_from_path"
            )
        with_optimizer = "optimizer" in self._load_contents
        loaded = self._session.training.load(
            manifest["checkpoint"], optimizer=with_optimizer
        ).result()
        if "extra" not in self._load_contents:
            return None
        state = loaded.metadata.get("random_state")
        if self._random_state and state is not None:
            torch.set_rng_state(torch.tensor(list(base64.b64decode(state)), dtype=torch.uint8))
        schedule: Mapping[str, Any] | None = loaded.metadata.get("lr_schedule")
        return schedule

    def _forget(self, local_path: str) -> None:
        folder = Path(local_path)
        manifest = _read(folder)
        if manifest is not None:
            self._delete(manifest["checkpoint"])
        shutil.rmtree(folder, ignore_errors=True)

    def _delete(self, name: str) -> None:
        if any(info.name == name for info in self._session.training.checkpoints().result()):
            self._session.training.delete(name).result()


class _Retention(BaseCheckpointManager):
    """verl's own rule of which saved paths to keep (`max_ckpt_to_keep`), with another way to
    remove one."""

    def __init__(self, forget: Callable[[str], None]) -> None:
        self.previous_saved_paths: list[str] = []
        self._forget = forget

    def remove_previous_save_local_path(self, path: str | list[str]) -> None:
        for each in [path] if isinstance(path, str) else path:
            self._forget(each)


def _read(folder: Path) -> dict[str, Any] | None:
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    manifest: dict[str, Any] = json.loads(text)
    if manifest.get("format") != _FORMAT:
        raise errors.InvalidRequestError(
            f"{folder / MANIFEST} has format {manifest.get('format')!r}; this version of the shim "
            f"reads format {_FORMAT}"
        )
    return manifest


def _write(folder: Path, manifest: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    half = folder / f"{MANIFEST}.half"
    half.write_text(json.dumps({"format": _FORMAT, **manifest}), encoding="utf-8")
    os.replace(half, folder / MANIFEST)
