"""Losses: metrics that don't depend on how a batch was cut (imports attrs, remote_rl.errors)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import attrs

from ..errors import InvalidRequestError

How = Literal["mean", "sum", "max", "min"]


@attrs.frozen
class Metric:
    """A number of one piece of a batch that merges with the other pieces' into the whole's.

    mean: total / weight. sum: total. max, min: total. `weight` is how many tokens a piece had to
    say something about: where it is 0, there is no value, except that a sum over nothing is 0.
    """

    how: How
    total: float
    weight: float

    def merge(self, other: Metric) -> Metric:
        """Both pieces together; the order does not matter."""
        if other.how != self.how:
            raise InvalidRequestError(f"a {self.how} can't be merged with a {other.how}")
        combine = {"max": max, "min": min}.get(self.how)
        total = combine(self.total, other.total) if combine else self.total + other.total
        return Metric(how=self.how, total=total, weight=self.weight + other.weight)

    @property
    def value(self) -> float | None:
        """The number itself, or None where nothing contributed."""
        if self.how == "sum":
            return self.total
        if self.weight == 0:
            return None
        return self.total / self.weight if self.how == "mean" else self.total


def merge_metrics(pieces: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """The metrics of all pieces of one batch together."""
    merged: dict[str, Metric] = {}
    for piece in pieces:
        for name, metric in piece.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


def metric_values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Plain numbers by name, without those to which nothing contributed (a mean over no tokens)."""
    values = {name: metric.value for name, metric in metrics.items()}
    return {name: value for name, value in values.items() if value is not None}
