"""Client: files of a checkpoint or export, over the transport (imports the contract)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConflictError, InvalidRequestError
from ..progress_line import ProgressLine
from ..requests import ListFiles, ReadFile
from ..run_info import FileChunk, FileList

if TYPE_CHECKING:
    from .session import Session

_CHUNK = 8 * 1024 * 1024


def download_files(session: Session, kind: str, name: str, destination: Path) -> Path:
    """Copies every file, in pieces, into a folder beside `destination` that takes its name when it
    is complete; what an earlier failure left of it is replaced."""
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConflictError(f"{destination} exists and is not an empty directory")
    request = ListFiles(kind=kind, name=name)  # type: ignore[arg-type]
    listed: FileList = session._submit("list_files", request).result()
    aside = destination.with_name(destination.name + ".partial")
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir(parents=True)
    line, done, total = ProgressLine(), 0, sum(listed.sizes)
    try:
        for path, size in zip(listed.paths, listed.sizes):
            target = _inside(aside, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                offset = 0
                while offset < size:
                    piece = ReadFile(
                        kind=request.kind,
                        name=name,
                        path=path,
                        offset=offset,
                        length=_CHUNK,
                        identity=listed.identity,
                    )
                    chunk: FileChunk = session._submit("read_file", piece).result()
                    count = len(chunk.data)
                    if chunk.size != size or not 0 < count <= size - offset:
                        raise ConflictError(
                            f"{path!r} of {kind} {name!r} was listed with {size:,} bytes and has "
                            f"others now; start the download again",
                            name=name,
                        )
                    file.write(chunk.data.tobytes())
                    offset += count
                    done += count
                    line.show(f"remote_rl: download of {name!r}, {done:,} of {total:,} bytes")
    finally:
        line.clear()
    if destination.exists():
        destination.rmdir()
    aside.rename(destination)
    return destination


def _inside(folder: Path, path: str) -> Path:
    target = (folder / path).resolve()
    if not target.is_relative_to(folder.resolve()):
        raise InvalidRequestError(f"the server lists {path!r}, which leads out of the directory")
    return target
