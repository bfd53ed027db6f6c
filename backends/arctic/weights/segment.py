"""Arctic backend: weights in POSIX shared memory (imports numpy, errors and manifest).

A segment is a file below /dev/shm whose name tells who answers for it: the process that removes it
in the end, its start time and its namespace of process ids. Whoever finds one can so tell whether
that process is gone. Standard `SharedMemory` objects are not used: their resource tracker removes
segments that others still need, and a segment that is too large for the machine ends the writer by
SIGBUS; here it is refused with the sizes.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from remote_rl.errors import BackendError, InvalidRequestError, nearest
from remote_rl.types.arrays import Array
from remote_rl.types.results import TENSOR_DTYPES

from .manifest import FLOATING, Entry, Manifest

PREFIX = "remote_rl-"
_FOLDER = Path("/dev/shm")
#: of /proc/PID/stat, counted from the field after the command's name
STATE_FIELD, _START_FIELD = 0, 19
#: of a bfloat16's bits
_EXPONENT = 0x7F80


@attrs.frozen
class Owner:
    """A process, told apart from later ones of the same number: its id, the clock tick at which
    it started, and its namespace of process ids."""

    process: int
    started: int
    namespace: int

    @property
    def prefix(self) -> str:
        """What the names of its segments begin with."""
        return f"{PREFIX}{self.process}-{self.started}-{self.namespace}-"


def owner_of(process: int) -> Owner:
    """The owner that this living process is. Raises `BackendError` where it is gone."""
    started = _start_time(process)
    if started is None:
        raise BackendError(f"process {process} is gone, so it can own no shared memory")
    return Owner(process, started, _namespace())


def new_name(owner: Owner | None = None) -> str:
    """A fresh name for a segment of this owner; None is this process."""
    return f"{(owner or owner_of(os.getpid())).prefix}{secrets.token_hex(6)}"


class Segment:
    """A mapped segment. It stays mapped as long as this object or an array of it lives, also after
    its name was removed."""

    def __init__(self, name: str, memory: mmap.mmap) -> None:
        self.name = name
        self.memory = memory

    @classmethod
    def create(cls, name: str, size: int) -> Segment:
        """A new one of this many bytes, all zero. Raises `BackendError` where the machine has no
        room for it."""
        descriptor = os.open(_path(name), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
            return cls(name, mmap.mmap(descriptor, size))
        except OSError as error:
            unlink(name)
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise BackendError(
                f"{_FOLDER} has no room for {size} bytes of weights ({_free()} are free); make it "
                "larger (in a container: --shm-size)"
            ) from error
        finally:
            os.close(descriptor)

    @classmethod
    def attach(cls, name: str) -> Segment:
        """The one of this name. Raises `BackendError` where there is none."""
        try:
            descriptor = os.open(_path(name), os.O_RDWR)
        except FileNotFoundError as error:
            raise BackendError(
                f"the shared memory {name!r} is gone; whoever made it has ended or removed it"
            ) from error
        try:
            # torch warns of memory that can't be written, so the mapping can
            return cls(name, mmap.mmap(descriptor, 0))
        finally:
            os.close(descriptor)

    @property
    def size(self) -> int:
        """Its bytes."""
        return len(self.memory)

    def holds(self, manifest: Manifest) -> None:
        """Raises `BackendError` unless the manifest's tensors lie within it."""
        if manifest.extent > self.size:
            raise BackendError(
                f"the shared memory {self.name!r} has {self.size} bytes, and its manifest speaks "
                f"of {manifest.extent}"
            )

    def not_finite(self, manifest: Manifest) -> str | None:
        """The first tensor that holds NaN or infinity, None where all numbers are finite."""
        for entry in manifest:
            if entry.dtype in FLOATING and not _finite(self.array(entry), entry.dtype):
                return entry.name
        return None

    def array(self, entry: Entry) -> Array:
        """The tensor as numpy sees it (bfloat16 as uint16), a view."""
        dtype = np.dtype(TENSOR_DTYPES[entry.dtype])
        count = entry.nbytes // dtype.itemsize
        if not count:
            return np.zeros(entry.shape, dtype)
        return np.frombuffer(self.memory, dtype, count, entry.offset).reshape(entry.shape)


class SegmentWriter:
    """Makes a segment and takes the tensors of its manifest, in any order, each once."""

    def __init__(self, name: str, manifest: Manifest) -> None:
        self._segment = Segment.create(name, manifest.extent)
        self._entries = {entry.name: entry for entry in manifest}
        self._left = set(self._entries)

    def write(self, name: str, tensor: Any) -> Entry:
        """Copies a tensor to its place: a numpy array of the dtype that TENSOR_DTYPES gives the
        entry's tag, or a torch tensor of any device, cast where its dtype is another."""
        entry = self._entries.get(name)
        if entry is None:
            raise InvalidRequestError(
                f"tensor {name!r} is not in the manifest ({nearest(name, self._entries)})",
                field=name,
            )
        if name not in self._left:
            raise InvalidRequestError(f"tensor {name!r} was written twice", field=name)
        if tuple(tensor.shape) != entry.shape:
            raise InvalidRequestError(
                f"tensor {name!r} has shape {list(tensor.shape)}, in the manifest "
                f"{list(entry.shape)}",
                field=name,
            )
        place = self._segment.array(entry)
        if hasattr(tensor, "detach"):
            _as_torch(place, entry.dtype).copy_(tensor.detach())
        elif tensor.dtype == place.dtype:
            place[...] = tensor
        else:
            raise InvalidRequestError(
                f"tensor {name!r} is an array of {tensor.dtype}; {entry.dtype} is held as "
                f"{place.dtype}",
                field=name,
            )
        self._left.discard(name)
        return entry

    def write_bytes(self, name: str, offset: int, data: Array) -> None:
        """Copies a stretch of a tensor's bytes, [bytes] uint8, to its place: `offset` bytes after
        the tensor's first. The last stretch completes it."""
        entry = self._entries[name]
        begin, end = entry.offset + offset, entry.offset + offset + data.nbytes
        self._segment.memory[begin:end] = data.data
        if offset + data.nbytes == entry.nbytes:
            self._left.discard(name)

    def finish(self) -> tuple[Entry, ...]:
        """All entries, in the manifest's order. Raises `BackendError` where some were not
        written."""
        left = [name for name in self._left if self._entries[name].nbytes]
        if left:
            raise BackendError(f"{len(left)} tensors were not written, {min(left)!r} among them")
        return tuple(self._entries.values())


def _finite(array: Array, dtype: str) -> bool:
    if not array.size:
        return True
    if dtype == "bfloat16":  # bits: NaN and infinity have all of the exponent's
        return int((array & _EXPONENT).max()) < _EXPONENT
    # NaN comes through both; no temporary of the array's size
    return bool(np.isfinite(array.min()) and np.isfinite(array.max()))


def _as_torch(place: Array, dtype: str) -> Any:
    import torch  # only where torch tensors come in

    return torch.from_numpy(place).view(getattr(torch, dtype))


def is_here(name: str) -> bool:
    """Whether this machine has a segment of this name."""
    return _path(name).exists()


def unlink(name: str) -> None:
    """Removes the name; its memory goes with the last mapping. No error where it is gone."""
    _path(name).unlink(missing_ok=True)


def remove_of(process: int) -> list[str]:
    """Removes what a process of this id and of our namespace made, living or dead; the names."""
    wanted = f"{PREFIX}{process}-"
    return [name for name in _ours() if name.startswith(wanted) and _remove(name)]


def sweep_dead() -> list[str]:
    """Removes the segments of our user whose owners are gone; their names. Those of another
    namespace of process ids (a container that shares /dev/shm) are left: from here nobody can tell
    whether their owners live."""
    return [name for name in _ours() if not _alive(name) and _remove(name)]


def _remove(name: str) -> bool:
    with contextlib.suppress(FileNotFoundError):  # somebody else was faster
        _path(name).unlink()
        return True
    return False


def _ours() -> list[str]:
    """Names of segments of our user and namespace."""
    found = []
    for path in sorted(_FOLDER.glob(f"{PREFIX}*")):
        with contextlib.suppress(FileNotFoundError):
            owner = _parse(path.name)
            if (
                owner is not None
                and owner.namespace == _namespace()
                and path.stat().st_uid == os.getuid()
            ):
                found.append(path.name)
    return found


def _parse(name: str) -> Owner | None:
    parts = name.removeprefix(PREFIX).split("-")
    if len(parts) != 4 or not all(part.isdigit() for part in parts[:3]):
        return None
    return Owner(int(parts[0]), int(parts[1]), int(parts[2]))


def _alive(name: str) -> bool:
    owner = _parse(name)
    return owner is not None and _start_time(owner.process) == owner.started


def process_facts(process: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the command's name; None where there is no such process
    (any more)."""
    try:
        # the command's name may hold spaces and brackets; nothing after its last bracket does
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _start_time(process: int) -> int | None:
    """Clock ticks since the machine's start; None where it has ended."""
    fields = process_facts(process)
    return None if fields is None or fields[STATE_FIELD] in "ZX" else int(fields[_START_FIELD])


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _free() -> int:
    space = os.statvfs(_FOLDER)
    return space.f_bavail * space.f_frsize


def _path(name: str) -> Path:
    if not name.startswith(PREFIX) or "/" in name:
        raise InvalidRequestError(f"{name!r} is no name of a segment of weights")
    return _FOLDER / name
