"""Arctic backend: what a run computes on, by what its ranks have found (imports config,
engine_factory and the contract)."""

from __future__ import annotations

from collections.abc import Collection

from remote_rl.types import Devices
from remote_rl.types.peaks import devices

from .config import ArcticConfig
from .engine_factory import on_cpu


def devices_of(config: ArcticConfig, kinds: Collection[str]) -> Devices:
    """kinds: the names of the ranks' devices. On a CPU each process counts as a device."""
    training, sampling = config.training, config.sampling
    engines = sampling.engines * (1 if on_cpu(config) else sampling.tensor_parallel)
    both = (training.ranks, engines)
    total = max(both) if config.placement.colocated else sum(both)
    dtype = config.model.dtype
    if len(set(kinds)) == 1:
        return devices(next(iter(kinds)), training.ranks, dtype, total)
    return Devices(
        kind=", ".join(sorted(set(kinds))),
        count=training.ranks,
        total=total,
        dtype=dtype,
        peak_flops=None,
        reason="the ranks run on devices of several kinds, which have no one peak",
    )
