"""Dispatcher: the files of one checkpoint or export on disk (imports nothing of remote_rl)."""

from __future__ import annotations

from pathlib import Path


def identity(folder: Path) -> str:
    """What no other directory has that takes its name later: it changes with every rename too."""
    status = folder.stat()
    return f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_ctime_ns:x}"


def list_files(folder: Path) -> dict[str, int]:
    """Relative path to size, of everything below that is no link."""
    return {
        str(path.relative_to(folder).as_posix()): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def file_below(folder: Path, path: str) -> Path | None:
    """The file that `list_files` lists as `path`; None for any other spelling, and where a part of
    it is a symbolic link."""
    place = folder
    try:
        for part in path.split("/"):
            if part in ("", ".", ".."):
                return None
            place = place / part
            if place.is_symlink():
                return None
        return place if place.is_file() else None
    except OSError:  # a name that no file system takes
        return None
