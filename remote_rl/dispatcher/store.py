"""Dispatcher: checkpoints and exports on disk, whole or absent (imports errors, results, run_info).

    ROOT/checkpoints/NAME/manifest.json   what it is; written last
    ROOT/checkpoints/NAME/state/...       the backend's own files
    ROOT/exports/NAME/...                 a Hugging Face directory
    ROOT/.partial-...                     being written, or left by a crash; swept at the start

A checkpoint is written aside and moved into place by one rename, so that a crash in the middle
leaves the earlier ones whole and no half one under a name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from ..errors import ConflictError, InvalidRequestError, nearest
from ..types.results import CheckpointInfo
from .stored_files import file_below, identity, list_files

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
        self._placing = threading.Lock()
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
            raise self._unknown(kind, name)
        return folder

    def _unknown(self, kind: str, name: str) -> InvalidRequestError:
        # another save may have made the name in between; it is no help then
        known = {path.name for path in self._folder(kind, name).parent.glob("*")} - {name}
        return InvalidRequestError(f"there is no {kind} {name!r}; {nearest(name, sorted(known))}")

    @contextlib.contextmanager
    def _vanishing(self, kind: str, name: str) -> Iterator[None]:
        """What another client or run deletes between look and use is refused by its name."""
        try:
            yield
        except (FileNotFoundError, NotADirectoryError):
            raise self._unknown(kind, name) from None

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
            except FileNotFoundError:  # deleted since it was found
                continue
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
            known = {info.name for info in self.checkpoints()} - {name}
            raise InvalidRequestError(
                f"there is no checkpoint {name!r}; {nearest(name, sorted(known))}"
            )
        with self._vanishing("checkpoint", name):
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
        """Removes what a failed save or export has written. Where a cancelled one is being moved
        into place at this moment on its thread, either it is there whole, or it never will be."""
        with self._placing:
            descriptor = self._writing.pop(partial, None)
        if descriptor is None:  # it was quicker, and is whole
            return
        try:
            shutil.rmtree(partial)
        except OSError as error:  # its writer may still be at work on a thread of its own
            log.warning("%s is left to be swept at the next start: %s", partial, error)
        finally:
            os.close(descriptor)

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
        with self._vanishing(kind, name):
            folder.rename(aside)
        shutil.rmtree(aside)

    def _place(self, partial: Path, kind: str, name: str, leftover: Path | None = None) -> Path:
        target = self._folder(kind, name)
        target.parent.mkdir(exist_ok=True)
        self.refuse_existing(kind, name)
        begun = leftover or partial
        with self._placing:
            if begun not in self._writing:
                raise ConflictError(f"{kind} {name!r} was given up before it was whole", name=name)
            try:
                partial.rename(target)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # another run was faster
                    self.refuse_existing(kind, name)
                raise
            descriptor = self._writing.pop(begun)
        _sync(target.parent)  # the name itself, before anybody is told of it
        if leftover is not None:
            leftover.rmdir()
        os.close(descriptor)
        return target

    def _read(self, path: Path) -> StoredCheckpoint:
        try:
            manifest: dict[str, Any] = dict(json.loads(path.read_text()))
            if manifest.pop("format", None) != _FORMAT:
                raise ValueError(f"its format is not {_FORMAT}")
            counters = {int(key): int(value) for key, value in manifest.pop("counters").items()}
            info = CheckpointInfo(**manifest)
        except (FileNotFoundError, NotADirectoryError):
            raise
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConflictError(
                f"checkpoint {path.parent.name!r} has a manifest that can't be read "
                f"({_why(error)}); training.delete({path.parent.name!r}) removes it",
                name=path.parent.name,
            ) from error
        return StoredCheckpoint(info, path.parent / "state", counters)

    # -- files, for download ----------------------------------------------------------------

    def files(self, kind: str, name: str) -> dict[str, int]:
        """Relative path to size, of a checkpoint or export."""
        folder = self._existing(kind, name)
        with self._vanishing(kind, name):
            return list_files(folder)

    def listing(self, kind: str, name: str) -> tuple[dict[str, int], str]:
        """`files`, and the identity by which `read` knows that nothing else has taken the name."""
        folder = self._existing(kind, name)
        with self._vanishing(kind, name):
            before = identity(folder)
            files = self.files(kind, name)
            if identity(folder) != before:
                raise _replaced(kind, name)
        return files, before

    def read(
        self, kind: str, name: str, path: str, offset: int, length: int, wanted: str | None = None
    ) -> tuple[bytes, int]:
        """Up to `length` bytes from `offset`, and the whole size. Only what `files` lists is read,
        so no path leads out of the directory. wanted: the listing's identity; `ConflictError`
        where the name now stands for something else."""
        folder = self._existing(kind, name)
        with self._vanishing(kind, name):
            target = file_below(folder, path)
            if target is None:
                _check(folder, kind, name, wanted)
                raise InvalidRequestError(f"{kind} {name!r} has no file {path!r}")
            with target.open("rb") as file:
                # looked at once the file is open: a directory that has left its name never gets
                # it back, so the file is of the same one
                _check(folder, kind, name, wanted)
                size = os.fstat(file.fileno()).st_size
                file.seek(min(offset, size))
                return file.read(length), size


def _check(folder: Path, kind: str, name: str, wanted: str | None) -> None:
    if wanted is not None and identity(folder) != wanted:
        raise _replaced(kind, name)


def _replaced(kind: str, name: str) -> ConflictError:
    return ConflictError(
        f"{kind} {name!r} was replaced or changed while it was being downloaded; start the "
        "download again",
        name=name,
    )


def _why(error: Exception) -> str:
    """Without the path, which is the server's own affair."""
    return str(error.strerror) if isinstance(error, OSError) else str(error)


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
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size(folder: Path) -> int:
    return sum(list_files(folder).values())
