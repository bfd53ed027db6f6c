"""Wire: the digest of a request, taken once, of a large one while its bytes are sent (imports
xxhash, messages and frames).

It is xxh3-128 over the request's own frame. In the frame of its Submit the arrays' bytes are the
same, so that they are read once for both, and the digest itself can be the frame's last array.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from ..messages import PendingDigest
from ..types.arrays import Array
from .frames import NO_BUFFERS, Buffers, head

DIGEST_BYTES = 16


class RequestDigest(PendingDigest):
    """A request's JSON, its arrays, and their digest. taken: its text, None before; where there are
    no arrays it is taken at once."""

    def __init__(self, request: str, arrays: Sequence[Array]) -> None:
        self.request = request
        self.buffers = Buffers.of(arrays) if arrays else NO_BUFFERS
        self._head = head(request, self.buffers.described)
        self.nbytes = len(self._head) + sum(map(len, self.buffers.parts))
        self.taken = None if arrays else xxhash.xxh3_128_hexdigest(self._head)

    def text(self) -> str:
        """32 hex digits, taken now if they have not been."""
        if self.taken is None:
            state = self.begin()
            for part in self.buffers.parts:
                state.update(part)
            self.end(state)
        assert self.taken is not None
        return self.taken

    def begin(self) -> xxhash.xxh3_128:
        """The state before the arrays' bytes."""
        return xxhash.xxh3_128(self._head)

    def end(self, state: xxhash.xxh3_128) -> bytes:
        """After all of them: the digest, the same for every later submission."""
        if self.taken is None:
            self.taken = state.hexdigest()
        return bytes.fromhex(self.taken)
