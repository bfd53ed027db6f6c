"""Shim (loop side, above the client): outputs that an earlier forward returned, by their rows.

Imports numpy and remote_rl. verl computes old logprobs right before an update, so those of
the first mini-batch are the current policy's, and a loss that runs here needs no other forward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

from remote_rl import Batch, Outputs


class KnownOutputs:
    """What the last forward of the current policy returned, by prompt, response and temperature
    of each row: mini-batches are other selections and orders of the same rows."""

    def __init__(self) -> None:
        self._rows: dict[bytes, int] = {}
        self._outputs: Outputs | None = None

    def remember(self, batch: Batch, outputs: Outputs) -> None:
        """Keeps `outputs`, of a forward of `batch`, instead of what was kept before."""
        self._rows = {key: row for row, key in enumerate(_keys(batch))}
        self._outputs = outputs

    def of(self, batch: Batch, names: frozenset[str], version: int | None) -> Outputs | None:
        """The outputs `names` of the rows of `batch`, Ragged[n] float32 each, as the weights of
        `version` gave them; None where any of it is not known, or the version is None."""
        held = self._outputs
        if held is None or held.version != version or not names <= set(held.values):
            return None
        found = [self._rows.get(key) for key in _keys(batch)]
        rows = [row for row in found if row is not None]
        if len(rows) < len(found):
            return None
        values = {name: held.values[name].select(np.array(rows, np.int64)) for name in names}
        return Outputs(values=values, version=held.version)


def _keys(batch: Batch) -> Iterator[bytes]:
    for prompt, response, temperature in zip(
        batch.prompt_index, batch.responses, batch.temperature, strict=True
    ):
        key = hashlib.blake2b(np.int64(len(response)).tobytes(), digest_size=16)
        for part in (response, batch.prompts[int(prompt)], temperature):
            key.update(np.ascontiguousarray(part).tobytes())
        yield key.digest()
