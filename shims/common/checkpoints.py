"""Shim (loop side, above the client): a framework's checkpoint folders, kept by the server.

Imports remote_rl. The weights stay in the server's checkpoint_dir, which may be another file
system; a small manifest in the framework's own folder names them.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from remote_rl import Session, errors

MANIFEST: Final = "remote_rl.json"
_FORMAT: Final = 1


class SavedFolders:
    """Saves and loads by folder.

    framework: begins the server's names of the checkpoints, and stands in their metadata. remedy:
    what to do about a folder that can't be loaded, in the framework's own words.
    """

    def __init__(self, session: Session, *, framework: str, remedy: str) -> None:
        self._session = session
        self._framework = framework
        self._remedy = remedy

    def save(
        self, folder: Path, step: int, metadata: Mapping[str, Any], *, optimizer: bool = True
    ) -> str:
        """Blocks until the server's checkpoint is complete, then writes the manifest; returns the
        server's name of it. An earlier checkpoint of the same folder goes last.

        metadata: JSON values that `load` returns.
        """
        replaced = self.manifest(folder)
        name = f"{self._framework}-global_step_{step}-{uuid.uuid4().hex[:12]}"
        told = {"framework": self._framework, "global_step": step, **metadata}
        self._session.training.save(name, metadata=told, optimizer=optimizer).result()
        _write(folder, {"checkpoint": name, "global_step": step})
        if replaced is not None:
            self.delete(replaced["checkpoint"])
        return name

    def load(self, folder: Path, *, optimizer: bool = True) -> Mapping[str, Any]:
        """Loads what the folder's manifest names; returns the metadata."""
        manifest = self.manifest(folder)
        if manifest is None:
            raise errors.InvalidRequestError(
                f"{folder} holds no {MANIFEST}, so it was not saved by remote_rl's shim; "
                f"{self._remedy}"
            )
        operation = self._session.training.load(manifest["checkpoint"], optimizer=optimizer)
        return operation.result().metadata

    def forget(self, folder: Path) -> None:
        """Removes the folder and the server's checkpoint that it names."""
        manifest = self.manifest(folder)
        if manifest is not None:
            self.delete(manifest["checkpoint"])
        shutil.rmtree(folder, ignore_errors=True)

    @staticmethod
    def manifest(folder: Path) -> dict[str, Any] | None:
        """What the folder says of its checkpoint, None where it says nothing."""
        try:
            text = (folder / MANIFEST).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        manifest: dict[str, Any] = json.loads(text)
        if manifest.get("format") != _FORMAT:
            raise errors.InvalidRequestError(
                f"{folder / MANIFEST} has format {manifest.get('format')!r}; this version of the "
                f"shim reads format {_FORMAT}"
            )
        return manifest

    def delete(self, name: str) -> None:
        """Removes the server's checkpoint of that name, where it still is."""
        if any(info.name == name for info in self._session.training.checkpoints().result()):
            self._session.training.delete(name).result()


def _write(folder: Path, manifest: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    half = folder / f"{MANIFEST}.half"
    half.write_text(json.dumps({"format": _FORMAT, **manifest}), encoding="utf-8")
    os.replace(half, folder / MANIFEST)
