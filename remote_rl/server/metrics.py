"""Server: a run's numbers and HTTP's own as Prometheus metrics (imports run_info, transports'
bodies; prometheus_client).

No label holds anything that a client chooses: operations, messages and errors come from fixed
lists.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ..run_info import Distribution, OperationStatus, RunStatus


class Traffic:
    """What passes through HTTP. received, sent: bytes of bodies. requests: by message and status.
    connections: how many are open."""

    def __init__(self) -> None:
        self.received = 0
        self.sent = 0
        self.requests: Counter[tuple[str, str]] = Counter()
        self.connections: Callable[[], int] = lambda: 0


def render(status: RunStatus, traffic: Traffic, accept: str) -> tuple[bytes, str]:
    """The exposition and its content type, in the format that `accept` asks for."""
    registry = CollectorRegistry()
    registry.register(_Now(status, traffic))
    ProcessCollector(registry=registry)
    encoder, content_type = choose_encoder(accept)
    return encoder(registry), content_type


class _Now(Collector):
    def __init__(self, status: RunStatus, traffic: Traffic) -> None:
        self._status = status
        self._traffic = traffic

    def collect(self) -> Iterable[Metric]:
        """All families, computed anew."""
        yield from _of_the_run(self._status)
        yield from _of_operations(self._status.operations)
        yield from _of_room(self._status)
        yield from _of_samples(self._status)
        yield from _of_http(self._traffic)


def _of_the_run(status: RunStatus) -> Iterator[Metric]:
    run = GaugeMetricFamily(
        "remote_rl_run_info",
        "1; its labels say what runs.",
        labels=["instance_id", "backend", "model", "software"],
    )
    run.add_metric([status.instance_id, status.backend, status.model, status.software], 1)
    yield run
    for name, text, value in (
        ("uptime_seconds", "Age of the run.", status.uptime),
        ("clients", "Clients that hold a lease, the driver included.", status.clients),
        ("driver", "1 while some client drives the run.", status.driver),
        ("paused", "1 while generation is held.", status.paused),
        ("stopping", "1 once the operator's stop has begun.", status.stopping),
        ("run_lost", "1 once the run is over and the server must be restarted.", bool(status.lost)),
        ("kept_bytes", "Arrays kept for clients, in requests and results.", status.kept_bytes),
        ("trainer_version", "Version of the trainer's weights.", status.versions.trainer),
        ("sampler_version", "Version that the sampler serves.", status.versions.sampler),
    ):
        if value is not None:  # a sampler may not know its version
            yield GaugeMetricFamily(f"remote_rl_{name}", text, value=float(value))


def _of_operations(operations: tuple[OperationStatus, ...]) -> Iterator[Metric]:
    by_name = ["operation"]
    outcomes = CounterMetricFamily(
        "remote_rl_operations",
        "Operations that ended, by outcome: ok or the class of the error.",
        labels=["operation", "outcome"],
    )
    refused = CounterMetricFamily(
        "remote_rl_refused",
        "Submits that were not accepted, late copies of ended operations included.",
        labels=["operation", "error"],
    )
    seconds = HistogramMetricFamily(
        "remote_rl_operation_seconds", "From beginning to end of an operation.", labels=by_name
    )
    queue = HistogramMetricFamily(
        "remote_rl_operation_queue_seconds", "From acceptance to beginning.", labels=by_name
    )
    running = GaugeMetricFamily(
        "remote_rl_operations_in_flight", "Operations that run now.", labels=by_name
    )
    queued = GaugeMetricFamily(
        "remote_rl_queue_length", "Operations that wait for their turn.", labels=by_name
    )
    received = CounterMetricFamily(
        "remote_rl_operation_received_bytes", "Bytes of arrays in requests.", labels=by_name
    )
    sent = CounterMetricFamily(
        "remote_rl_operation_sent_bytes", "Bytes of arrays in results.", labels=by_name
    )
    for each in operations:
        name = [each.name]
        outcomes.add_metric([each.name, "ok"], each.succeeded)
        for error, count in sorted(each.failed.items()):
            outcomes.add_metric([each.name, error], count)
        for error, count in sorted(each.refused.items()):
            refused.add_metric([each.name, error], count)
        seconds.add_metric(name, *_buckets(each.run_seconds))
        queue.add_metric(name, *_buckets(each.queue_seconds))
        running.add_metric(name, each.running)
        queued.add_metric(name, each.queued)
        received.add_metric(name, each.received_bytes)
        sent.add_metric(name, each.sent_bytes)
    yield from (outcomes, refused, seconds, queue, running, queued, received, sent)


def _of_room(status: RunStatus) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "remote_rl_busy", "Submits that had no room and were sent back to wait.", value=status.busy
    )


def _of_samples(status: RunStatus) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "remote_rl_generated_samples", "Samples generated.", value=status.generated_samples
    )
    yield CounterMetricFamily(
        "remote_rl_generated_tokens", "Tokens generated.", value=status.generated_tokens
    )
    buckets, total = _buckets(status.staleness)
    yield HistogramMetricFamily(
        "remote_rl_sample_staleness_versions",
        "Versions that the trainer was ahead of a sample's first one when the sample ended.",
        buckets=buckets,
        sum_value=total,
    )


def _of_http(traffic: Traffic) -> Iterator[Metric]:
    requests = CounterMetricFamily(
        "remote_rl_http_requests",
        "Requests by message and status; closed is one whose client went away.",
        labels=["message", "status"],
    )
    for (message, status), count in sorted(traffic.requests.items()):
        requests.add_metric([message, status], count)
    yield requests
    yield CounterMetricFamily(
        "remote_rl_received_bytes", "Bytes of bodies received.", value=traffic.received
    )
    yield CounterMetricFamily("remote_rl_sent_bytes", "Bytes of bodies sent.", value=traffic.sent)
    yield GaugeMetricFamily(
        "remote_rl_http_connections", "Open connections.", value=traffic.connections()
    )


def _buckets(numbers: Distribution) -> tuple[list[tuple[str, float]], float]:
    bounds = [*(str(float(bound)) for bound in numbers.bounds), "+Inf"]
    return list(zip(bounds, itertools.accumulate(numbers.counts))), numbers.total
