"""Arctic backend: weights other than the current ones, in host memory (imports torch, the engine).

A shard is a copy of the masters that this rank owns, so ranks hold a set of weights together, each
its part (at ZeRO 0 each has it whole). The base is kept as a shard too, from just before the
weights first change: a reference's forward is needed in every step of a run with a KL term, and
reading a model's files each time would cost more than the memory does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from .zero import Zero

#: one host tensor for each master; never written again
Shard: TypeAlias = tuple[Tensor, ...]

BASE, CURRENT, REFERENCE = "base", "current", "reference"


class Shards:
    """Base, reference and snapshots of a rank. None stands for the current weights, as long as
    they are still the base."""

    def __init__(self, zero: Zero) -> None:
        self._zero = zero
        self._base: Shard | None = None
        self._reference: Shard | None = None
        self._follows_base = True
        self._snapshots: dict[str, Shard] = {}

    def before_change(self) -> None:
        """Keeps the base; to be called before anything that may change the weights."""
        if self._base is None:
            self._base = self.copied()

    def copied(self) -> Shard:
        """The current weights."""
        return tuple(_to_host(master) for master in self._zero.masters)

    @torch.no_grad()
    def restore(self, shard: Sequence[Tensor]) -> None:
        """Makes a shard's weights the current ones."""
        self.before_change()
        for master, held in zip(self._zero.masters, shard, strict=True):
            master.copy_(held)
        self._zero.refresh()

    # -- by name ------------------------------------------------------------------------------

    def keep(self, name: str) -> None:
        """A snapshot of the current weights."""
        self._snapshots[name] = self.copied()

    def drop(self, name: str) -> None:
        """Forgets a snapshot; a reference that was set from it stays."""
        del self._snapshots[name]

    def restore_named(self, name: str) -> None:
        """Makes the base's or a snapshot's weights the current ones."""
        shard = self._base if name == BASE else self._snapshots[name]
        if shard is not None:
            self.restore(shard)

    def set_reference(self, source: str) -> None:
        """The base, the current weights, or a snapshot."""
        self._follows_base = source == BASE
        if source == CURRENT:
            self._reference = self.copied()
        else:
            self._reference = None if source == BASE else self._snapshots[source]

    def adopt_reference(self, shard: Shard | None) -> None:
        """A reference from a checkpoint; None is the base."""
        self._reference, self._follows_base = shard, shard is None

    @property
    def reference(self) -> Shard | None:
        """The reference's weights where they are not the base."""
        return None if self._follows_base else self._reference

    def is_base(self, policy: str) -> bool:
        """Whether a policy's name means the base."""
        return policy == BASE or (policy == REFERENCE and self._follows_base)

    @contextlib.contextmanager
    def showing(self, policy: str) -> Iterator[None]:
        """Within, the model computes with a policy: "current", "reference", "base" or a
        snapshot's name."""
        if policy == CURRENT:
            shard = None
        elif self.is_base(policy):
            shard = self._base
        else:
            shard = self._reference if policy == REFERENCE else self._snapshots[policy]
        if shard is None:
            yield
            return
        with self._zero.showing(shard):
            yield

    def clear(self) -> None:
        """As in a new run, except that the base is still held."""
        self._snapshots.clear()
        self.set_reference(BASE)


def _to_host(master: Tensor) -> Tensor:
    host = torch.empty(master.shape, dtype=master.dtype)
    host.copy_(master.detach())
    return host
