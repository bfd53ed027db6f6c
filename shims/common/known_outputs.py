"""Shim (loop side, above the client): outputs that an earlier forward returned, by their rows.

Imports numpy and remote_rl. Frameworks compute old logprobs right before an update, so those of the
first mini-batch are the current policy's, and a loss that runs here needs no other forward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

from remote_rl import Batch, Outputs


class KnownOutputs:
    """What forwards of the current policy returned, by prompt, response and temperature of each
    row: mini-batches are other selections and orders of the rows of one forward, or the very
    mini-batches that forwards were made of."""

    def __init__(self) -> None:
        self._held: list[tuple[dict[bytes, int], Outputs]] = []

    def remember(self, batch: Batch, outputs: Outputs) -> None:
        """Keeps `outputs`, of a forward of `batch`, beside those of the same weights and other
        rows; all others are forgotten."""
        rows = {key: row for row, key in enumerate(_keys(batch))}
        self._held = [
            (held, before)
            for held, before in self._held
            if before.version == outputs.version and not held.keys() <= rows.keys()
        ]
        self._held.append((rows, outputs))

    def of(self, batch: Batch, names: frozenset[str], version: int | None) -> Outputs | None:
        """The outputs `names` of the rows of `batch`, Ragged[n] float32 each, as the weights of
        `version` gave them in one forward; None where any of it is not known, or the version is
        None."""
        usable = [
            (known, held)
            for known, held in self._held
            if held.version == version and names <= set(held.values)
        ]
        keys = list(_keys(batch)) if usable else []
        for known, held in usable:
            if all(key in known for key in keys):
                rows = np.array([known[key] for key in keys], np.int64)
                values = {name: held.values[name].select(rows) for name in names}
                return Outputs(values=values, version=held.version)
        return None


def _keys(batch: Batch) -> Iterator[bytes]:
    for prompt, response, temperature in zip(
        batch.prompt_index, batch.responses, batch.temperature, strict=True
    ):
        key = hashlib.blake2b(np.int64(len(response)).tobytes(), digest_size=16)
        for part in (response, batch.prompts[int(prompt)], temperature):
            key.update(np.ascontiguousarray(part).tobytes())
        yield key.digest()
