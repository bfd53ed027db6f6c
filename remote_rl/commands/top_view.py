"""Command line: what `remote-rl top` shows of a run (imports run_info)."""

from __future__ import annotations

from typing import Any

import attrs

from ..run_info import Distribution, OperationStatus, RunStatus


@attrs.frozen(kw_only=True)
class Rates:
    """How much a second: operations that ended, tokens generated, bytes of arrays in requests and
    results. since_start: over the run's whole life, not since the last look."""

    operations: float
    tokens: float
    received: float
    sent: float
    since_start: bool

    @classmethod
    def between(cls, earlier: RunStatus | None, now: RunStatus, seconds: float) -> Rates:
        """From one look to the next, `seconds` later; from the start where there is no earlier one
        or where it was of another run."""
        fresh = earlier is None or earlier.instance_id != now.instance_id
        first = (0.0, 0.0, 0.0, 0.0) if earlier is None or fresh else _totals(earlier)
        span = max(now.uptime if fresh else seconds, 1e-9)
        operations, tokens, received, sent = (
            (after - before) / span for before, after in zip(first, _totals(now))
        )
        return cls(
            operations=operations, tokens=tokens, received=received, sent=sent, since_start=fresh
        )


def _totals(status: RunStatus) -> tuple[float, float, float, float]:
    return (
        sum(each.ended for each in status.operations),
        status.generated_tokens,
        sum(each.received_bytes for each in status.operations),
        sum(each.sent_bytes for each in status.operations),
    )


def as_json(status: RunStatus, rates: Rates) -> dict[str, Any]:
    """All of it as JSON values; a distribution is its count, its mean and `half_below`."""

    def plain(_: Any, __: Any, value: Any) -> Any:
        if isinstance(value, Distribution):
            return {"count": value.count, "mean": value.mean, "half_below": half_below(value)}
        if isinstance(value, tuple) and value and isinstance(value[0], OperationStatus):
            return [attrs.asdict(each, value_serializer=plain) for each in value]
        return value

    return {
        **attrs.asdict(status, value_serializer=plain),
        "rates": attrs.asdict(rates),
    }


def as_lines(status: RunStatus, rates: Rates, target: str) -> list[str]:
    """All of it for reading, at most one line an operation below eight others."""
    return [*_head(status, rates, target), "", *_table(status.operations)]


def _head(status: RunStatus, rates: Rates, target: str) -> list[str]:
    versions = status.versions
    sampler = "unknown" if versions.sampler is None else str(versions.sampler)
    label = "" if versions.label is None else f" (label {versions.label})"
    rows = [
        ("server", f"{target}  {status.backend}, model {status.model}, up {_age(status.uptime)}"),
        ("state", _state(status)),
        ("clients", f"{status.clients}{'' if status.driver else ', no driver'}"),
        ("weights", f"trainer {versions.trainer}, sampler {sampler}{label}"),
        ("staleness", _staleness(status)),
        (
            "rates",
            f"{rates.operations:.1f} operations/s, {rates.tokens:,.0f} tokens/s, "
            f"{_bytes(rates.received)}/s in, {_bytes(rates.sent)}/s out"
            + (" since the start" if rates.since_start else ""),
        ),
        ("kept", f"{_bytes(status.kept_bytes)} for clients"),
        ("failure", _failure(status)),
    ]
    return [f"{name:<10} {value}" for name, value in rows]


def _state(status: RunStatus) -> str:
    if status.lost is not None:
        return f"LOST: {status.lost}"
    words = ["stopping"] if status.stopping else []
    words += ["generation paused"] if status.paused else []
    return ", ".join(words) or "runs"


def _staleness(status: RunStatus) -> str:
    if status.recent_mean is None or status.recent_max is None:
        return "no samples yet"
    return f"mean {status.recent_mean:.2f}, max {status.recent_max} versions (latest samples)"


def _failure(status: RunStatus) -> str:
    last = status.last_failure
    if last is None:
        return "none"
    return f"{last.error} in {last.operation}, {_age(last.seconds_ago)} ago"


def _table(operations: tuple[OperationStatus, ...]) -> list[str]:
    if not operations:
        return ["no operations yet"]
    width = max(len(each.name) for each in operations)
    head = f"{'operation':<{width}} {'running':>8} {'queued':>7} {'done':>10} {'failed':>7}"
    lines = [f"{head} {'mean s':>9} {'half <=':>9}"]
    for each in operations:
        mean = each.run_seconds.mean
        half = half_below(each.run_seconds)
        lines.append(
            f"{each.name:<{width}} {each.running:>8} {each.queued:>7} {each.succeeded:>10,} "
            f"{each.ended - each.succeeded:>7,} {'-' if mean is None else f'{mean:.4f}':>9} "
            f"{'-' if half is None else f'{half:g}':>9}"
        )
    return lines


def half_below(numbers: Distribution) -> float | None:
    """The lowest bound that at least half of the numbers lie at or below; None of none, and where
    that is above all bounds."""
    below, half = 0, numbers.count / 2
    for bound, count in zip(numbers.bounds, numbers.counts):
        below += count
        if below and below >= half:
            return bound
    return None


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _age(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
