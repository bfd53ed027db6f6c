"""Dispatcher: checkpoints and exports on disk, whole or absent (imports errors, results, run_info).

    ROOT/checkpoints/NAME/manifest.json   what it is; written last
    ROOT/checkpoints/NAME/state/...       the backend's own files
    ROOT/exports/NAME/...                 a Hugging Face directory
    ROOT/.partial-...                     being written, or left by a crash; swept at the start

A checkpoint is written aside and moved into place by one rename, so that a crash in the middle
leaves the earlier ones whole and no half one under a name.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from ..errors import ConflictError, InvalidRequestError, nearest
from ..types.results import CheckpointInfo

log = logging.getLogger("remote_rl.dispatcher")

_FORMAT = 1
_PARTIAL = ".partial-"


@attrs.frozen
class StoredCheckpoint:
    """info: as listed. directory: the backend's files. counters: of generates, by ordinal."""

    info: CheckpointInfo
    directory: Path
    counters: Mapping[int, int]


class Store:
    """The files of a run below one directory; None refuses everything that needs it."""

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self._writing: dict[Path, int] = {}
        if root is None:
            return
        try:
            root.mkdir(parents=True, exist_ok=True)
            for leftover in root.glob(f"{_PARTIAL}*/"):
                _sweep(leftover)
        except OSError as error:
            raise InvalidRequestError(
                f"checkpoint_dir {str(root)!r} can't be used: {error}", field="checkpoint_dir"
            ) from error

    @property
    def available(self) -> bool:
        """Whether there is a directory at all."""
        return self._root is not None

    def root(self) -> Path:
        """The directory; `InvalidRequestError` where the run has none."""
        if self._root is None:
            raise InvalidRequestError(
                "this run keeps no files: pass checkpoint_dir= to connect, or --checkpoint-dir to "
                "remote-rl serve"
            )
        return self._root

    def _folder(self, kind: str, name: str) -> Path:
        if name in ("", "..") or Path(name).name != name:  # it would lead elsewhere
            raise InvalidRequestError(f"{name!r} can't be the name of a file of this run")
        return self.root() / f"{kind}s" / name

    def _existing(self, kind: str, name: str) -> Path:
        folder = self._folder(kind, name)
        if not folder.is_dir():
            known = [path.name for path in folder.parent.glob("*")]
            raise InvalidRequestError(f"there is no {kind} {name!r}; {nearest(name, known)}")
        return folder

    # -- checkpoints ------------------------------------------------------------------------

    def checkpoints(self) -> tuple[CheckpointInfo, ...]:
        """All of them, oldest first."""
        if self._root is None:
            return ()
        folder = self._root / "checkpoints"
        found = []
        for path in folder.glob("*/manifest.json"):
            try:
                found.append(self._read(path).info)
            except ConflictError as error:  # a damaged one must not hide the others
                log.warning("%s", error)
        return tuple(sorted(found, key=lambda info: (info.created, info.version, info.name)))

    def latest(self) -> str | None:
        """Name of the newest checkpoint."""
        listed = self.checkpoints()
        return listed[-1].name if listed else None

    def start_hint(self) -> str:
        """What to say as `start=` to go on from here in a new run."""
        latest = self.latest()
        return f"{latest!r}, its last checkpoint" if latest else "'base' (it left no checkpoint)"

    def checkpoint(self, name: str) -> StoredCheckpoint:
        """One by name."""
        path = self._folder("checkpoint", name) / "manifest.json"
        if not path.is_file():
            known = [info.name for info in self.checkpoints()]
            raise InvalidRequestError(f"there is no checkpoint {name!r}; {nearest(name, known)}")
        return self._read(path)

    def refuse_existing(self, kind: str, name: str) -> None:
        """`ConflictError` where the name is taken."""
        if self._folder(kind, name).exists():
            how = f"training.delete({name!r}" + (", kind='export')" if kind == "export" else ")")
            raise ConflictError(
                f"{kind} {name!r} exists; choose another name or delete it first with {how}",
                name=name,
            )

    def begin(self, kind: str, name: str) -> Path:
        """An empty directory to write into."""
        self.refuse_existing(kind, name)
        path = self.root() / f"{_PARTIAL}{uuid.uuid4().hex}"
        (path / "state").mkdir(parents=True)
        self._writing[path] = _locked(path)
        return path

    def abandon(self, partial: Path) -> None:
        """Removes what a failed save or export has written."""
        os.close(self._writing.pop(partial))
        shutil.rmtree(partial)

    def finish_checkpoint(
        self, partial: Path, info: CheckpointInfo, counters: Mapping[int, int]
    ) -> CheckpointInfo:
        """Moves a written checkpoint into place and returns it with its time and size."""
        complete = attrs.evolve(info, created=time.time(), bytes=_size(partial))
        manifest = {"format": _FORMAT, "counters": dict(counters), **attrs.asdict(complete)}
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
        _flush(partial)
        self._place(partial, "checkpoint", info.name)
        return complete

    def finish_export(self, partial: Path, name: str) -> Path:
        """Moves a written export into place."""
        return self._place(partial / "state", "export", name, leftover=partial)

    def delete(self, kind: str, name: str) -> None:
        """Removes a checkpoint or export, at once for every reader; a damaged one too."""
        folder = self._existing(kind, name)
        aside = self.root() / f"{_PARTIAL}{uuid.uuid4().hex}"
        folder.rename(aside)
        shutil.rmtree(aside)

    def _place(self, partial: Path, kind: str, name: str, leftover: Path | None = None) -> Path:
        target = self._folder(kind, name)
        target.parent.mkdir(exist_ok=True)
        self.refuse_existing(kind, name)
        try:
            partial.rename(target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # another run was faster
                self.refuse_existing(kind, name)
            raise
        if leftover is not None:
            leftover.rmdir()
        os.close(self._writing.pop(leftover or partial))
        return target

    def _read(self, path: Path) -> StoredCheckpoint:
        try:
            manifest: dict[str, Any] = dict(json.loads(path.read_text()))
            if manifest.pop("format", None) != _FORMAT:
                raise ValueError(f"its format is not {_FORMAT}")
            counters = {int(key): int(value) for key, value in manifest.pop("counters").items()}
            info = CheckpointInfo(**manifest)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConflictError(
                f"checkpoint {path.parent.name!r} has a manifest that can't be read ({error}); "
                f"remove {path.parent}",
                name=path.parent.name,
            ) from error
        return StoredCheckpoint(info, path.parent / "state", counters)

    # -- files, for download ----------------------------------------------------------------

    def files(self, kind: str, name: str) -> dict[str, int]:
        """Relative path to size, of a checkpoint or export."""
        return _files(self._existing(kind, name))

    def read(self, kind: str, name: str, path: str, offset: int, length: int) -> tuple[bytes, int]:
        """Up to `length` bytes from `offset`, and the whole size. Only listed files are read, so
        no path leads out of the directory."""
        listed = self.files(kind, name)
        if path not in listed:
            raise InvalidRequestError(f"{kind} {name!r} has no file {path!r}")
        with (self._folder(kind, name) / path).open("rb") as file:
            file.seek(offset)
            return file.read(length), listed[path]


def _locked(folder: Path) -> int:
    """A descriptor that holds the folder for as long as it is open, whatever becomes of the
    process; `BlockingIOError` where another one holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _sweep(leftover: Path) -> None:
    """Removes what a crash left; what another run is still writing stays."""
    try:
        descriptor = _locked(leftover)
    except (BlockingIOError, FileNotFoundError):
        return
    shutil.rmtree(leftover)
    os.close(descriptor)


def _flush(folder: Path) -> None:
    """Everything below reaches the disk before the rename that makes it visible."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _files(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder).as_posix()): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def _size(folder: Path) -> int:
    return sum(_files(folder).values())
