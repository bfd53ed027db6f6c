"""Transport: memory for a body that arrives piece by piece (imports nothing of remote_rl)."""

from __future__ import annotations

import mmap

#: from here on a body lies in huge pages, where the system has them: most of the time that a large
#: body takes goes into the faults of fresh small pages
_HUGE_FROM = 4 << 20
#: from here on they are reserved ahead, and the pieces go there as they come
_AHEAD_FROM = 16 << 20
_HAS_HUGE_PAGES = hasattr(mmap, "MADV_HUGEPAGE") and hasattr(mmap, "MAP_ANONYMOUS")
#: pieces shorter than this are copied together at once: each object costs memory of its own
_SHORT = 8 << 10


class GrowingBuffer:
    """Appended pieces, and at the end one contiguous memory. All of it is at most about twice as
    large as what was appended.

    A single piece is kept as it is; of several, each byte is copied once. (Each one is kept until
    the end, or until there are so many that the memory is reserved ahead. Memory that grows by
    itself is slower: it is moved, and its pages are new.)
    """

    def __init__(self) -> None:
        self.size = 0
        self._pieces: list[bytes | bytearray] = []
        self._huge: mmap.mmap | None = None

    def append(self, piece: bytes) -> None:
        """Adds `piece` at the end."""
        start, self.size = self.size, self.size + len(piece)
        if self._huge is not None or (self.size >= _AHEAD_FROM and _HAS_HUGE_PAGES and start):
            self._append_huge(start, piece)
        elif not self._pieces or len(piece) >= _SHORT:
            self._pieces.append(piece)
        else:
            self._append_short(piece)

    def contents(self) -> memoryview:
        """All that was appended; the memory lives as long as the view or an array in it."""
        if len(self._pieces) > 1 and self.size >= _HUGE_FROM and _HAS_HUGE_PAGES:
            self._move(self.size)
        if self._huge is not None:
            return memoryview(self._huge)[: self.size]
        if len(self._pieces) > 1:
            self._pieces = [b"".join(self._pieces)]
        return memoryview(self._pieces[0] if self._pieces else b"")

    def _append_short(self, piece: bytes) -> None:
        last = self._pieces[-1]
        if isinstance(last, bytearray) and len(last) < _SHORT:
            last += piece
        else:
            self._pieces.append(bytearray(piece))

    def _append_huge(self, start: int, piece: bytes) -> None:
        if self._huge is None:
            self._huge = self._move(2 * self.size)
        elif self.size > len(self._huge):
            # the kernel moves the pages, nothing is copied
            self._huge.resize(max(2 * start, self.size))
            self._huge.madvise(mmap.MADV_HUGEPAGE)
        self._huge[start : self.size] = piece

    def _move(self, size: int) -> mmap.mmap:
        """The pieces in `size` bytes of huge pages."""
        pages = self._huge = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_HUGEPAGE)
        place = 0
        for piece in self._pieces:
            pages[place : place + len(piece)] = piece
            place += len(piece)
        self._pieces = []
        return pages
