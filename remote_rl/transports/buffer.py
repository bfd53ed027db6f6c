"""Transport: memory for a body that arrives piece by piece (imports nothing of remote_rl)."""

from __future__ import annotations

import mmap

#: from here on a body lies in huge pages, where the system has them: most of the time that a large
#: body takes goes into the faults of fresh small pages
_HUGE_FROM = 4 << 20
_HAS_HUGE_PAGES = hasattr(mmap, "MADV_HUGEPAGE") and hasattr(mmap, "MAP_ANONYMOUS")


class GrowingBuffer:
    """Appended pieces in one contiguous memory, at most twice as large as what was appended.

    A single piece is kept as it is; of several, each byte is copied once.
    """

    def __init__(self) -> None:
        self.size = 0
        self._first = b""
        self._small = bytearray()
        self._huge: mmap.mmap | None = None

    def append(self, piece: bytes) -> None:
        """Adds `piece` at the end."""
        start, self.size = self.size, self.size + len(piece)
        if start == 0:
            self._first = piece
        elif self._huge is not None or (self.size >= _HUGE_FROM and _HAS_HUGE_PAGES):
            self._append_huge(start, piece)
        else:
            if self._first:
                self._small += self._first
                self._first = b""
            self._small += piece

    def contents(self) -> memoryview:
        """All that was appended; the memory lives as long as the view or an array in it."""
        return memoryview(self._huge or self._small or self._first)[: self.size]

    def _append_huge(self, start: int, piece: bytes) -> None:
        if self._huge is None:
            self._huge = _pages(2 * self.size)
            self._huge[:start] = self._small or self._first
            self._small, self._first = bytearray(), b""
        elif self.size > len(self._huge):
            # the kernel moves the pages, nothing is copied
            self._huge.resize(max(2 * start, self.size))
            self._huge.madvise(mmap.MADV_HUGEPAGE)
        self._huge[start : self.size] = piece


def _pages(size: int) -> mmap.mmap:
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
