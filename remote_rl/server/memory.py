"""Server: memory that large messages took is kept for the next ones, and goes back to the system
once none come (imports asyncio and ctypes)."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

#: a body of this size leaves holes in the allocator's heap that are worth giving back
LARGE_BYTES = 1 << 20
#: without a large message, before that is done
QUIET_SECONDS = 0.2
#: options of glibc's mallopt, and the values they get: the largest that glibc itself arrives at, as
#: soon as a chunk of that size has been freed
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _FROM_HEAP_BYTES = 64 << 20, 32 << 20


class Trimmer:
    """Has the C library's allocator keep free pages, and gives them back once no large message has
    come for a moment.

    A body arrives in pieces, each of which passes through memory of its own. An allocator that
    returns every piece to the system at once spends more time on faults of fresh pages than the
    copying takes; what it keeps can be tens of megabytes. Where the C library is not glibc this
    does nothing.
    """

    def __init__(self) -> None:
        self._trim = _keep_and_trim()
        self._timer: asyncio.TimerHandle | None = None

    def moved(self, size: int) -> None:
        """A body of so many bytes has been received or sent; on the loop."""
        if size < LARGE_BYTES or self._trim is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(QUIET_SECONDS, self._trim, 0)


def _keep_and_trim() -> Callable[[int], int] | None:
    """`malloc_trim`, with an allocator from now on that leaves it to this."""
    try:
        library = ctypes.CDLL(None)
        trim: Callable[[int], int] = library.malloc_trim
        option: Callable[[int, int], int] = library.mallopt
    except (AttributeError, OSError, TypeError):  # not glibc; not even a C library to ask, Windows
        return None
    option(_TRIM_THRESHOLD, _KEPT_BYTES)
    option(_MMAP_THRESHOLD, _FROM_HEAP_BYTES)
    return trim
