"""Shim (loop side, above the client): results of the update under verl's metric names, and how well
the server's devices were used.

Imports remote_rl's types. Each value is one mini-batch's; verl reduces the lists by mean, or by max
or min where a name says so.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from remote_rl import Devices, Outputs, Work, mfu
from remote_rl.types import ForwardBackwardResult, OptimStepResult

log = logging.getLogger("remote_rl.shims.verl")

#: remote_rl's metric -> verl's; others keep their name
_NAMES: Mapping[str, str] = {
    "policy_loss": "actor/pg_loss",
    "clip_fraction": "actor/pg_clipfrac",
    "clip_fraction_dual": "actor/pg_clipfrac_lower",
    "approximate_kl_k1": "actor/ppo_kl",
    "entropy": "actor/entropy_loss",
    "kl_loss": "kl_loss",
}

#: what the update reports of a step, as verl prefixes it -> the name in verl's log. The first is
#: that of verl's own trainer before V1; the others are the server's count
STEP_NAMES: Mapping[str, str] = {
    "actor/mfu_infer": "perf/mfu/actor_infer",
    "actor/computed_tokens": "perf/computed_tokens",
    "actor/computing_seconds": "perf/computing_seconds",
    "actor/computed_throughput": "perf/computed_throughput",
}


def mini_batch_metrics(
    gradient: ForwardBackwardResult, step: OptimStepResult, actor: Any
) -> dict[str, float]:
    """One mini-batch's metrics, by the names of stock verl's actor."""
    values = {_NAMES.get(name, name): value for name, value in gradient.metrics.items()}
    values |= {"loss": gradient.value, "grad_norm": step.grad_norm}
    if actor.use_kl_loss:
        values["kl_coef"] = actor.kl_loss_coef
    return values


def collect(rows: list[dict[str, float]], lr: float | None) -> dict[str, list[float]]:
    """The mini-batches' metrics as lists, and the learning rate after the schedule's step."""
    lists: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            lists.setdefault(name, []).append(value)
    if lr is not None:
        lists["lr"] = [lr]
    return lists


class Meter:
    """How well a worker's calls use the devices, by what the server says of both; verl's own
    counter wants CUDA here, and knows neither the server's devices nor shared prompts.

    devices: of the run, None where the server doesn't say. Where a share of the peak is unknown it
    is 0, and the reason is logged once.
    """

    def __init__(self, devices: Devices | None = None) -> None:
        self._devices = devices
        self._told: set[str] = set()
        self._forwards: list[Work | None] = []
        self._of_the_actor: list[Work | None] = []

    def forward(self, computed: Outputs, policy: str) -> float:
        """Takes note of a forward, for the next `update`; its share of the peak, 0 to 1."""
        self._forwards.append(computed.work)
        if policy == "current":
            self._of_the_actor.append(computed.work)
        return self._share([computed.work])

    def update(self, works: Iterable[Work | None]) -> dict[str, list[float]]:
        """Metrics of an update, whose operations did `works`, and of the forwards before it:

        `mfu`: share of the peak of the update alone; 0 where unknown, since verl insists on it.
        `mfu_infer`: that of the forwards for old logprobs, where there were any.
        `computed_tokens`, `computing_seconds`, `computed_throughput`: positions that went through
        the model in all of them, prompts once; the time; both by each other, for each device that
        trains. Where the server counts.
        """
        own = list(works)
        found = {"mfu": [self._share(own)]}
        if self._of_the_actor:
            found["mfu_infer"] = [self._share(self._of_the_actor)]
        total = Work.total([*self._forwards, *own])
        if total is not None:
            found["computed_tokens"] = [float(total.tokens)]
            found["computing_seconds"] = [total.seconds]
            if total.seconds > 0:
                devices = 1 if self._devices is None else self._devices.count
                found["computed_throughput"] = [total.tokens / (total.seconds * devices)]
        self._forwards, self._of_the_actor = [], []
        return found

    def _share(self, works: Iterable[Work | None]) -> float:
        share, reason = mfu(Work.total(works), self._devices)
        if share is not None:
            return share
        assert reason is not None
        if reason not in self._told:
            self._told.add(reason)
            log.warning("perf/mfu is 0: %s", reason)
        return 0.0
