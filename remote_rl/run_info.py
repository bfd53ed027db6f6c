"""Contract: what a run says of itself and of its files (imports protocol and types)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np

from .protocol import Capabilities, ModelInfo
from .types.arrays import Array
from .types.fields import (
    Validator,
    as_tuple,
    each,
    flag,
    instance_of,
    integer,
    number,
    optional,
    plain,
    refuse,
    strict,
    text,
)
from .types.result_fields import as_float, named_counts, real, size_field
from .types.results import CheckpointInfo, WeightsVersion
from .types.work import Devices


@strict
@attrs.frozen(kw_only=True)
class RunInfo:
    """What `info` answers.

    instance_id: of this run, new with every start. backend, model, capabilities: what it is.
    protocol_versions, software: what the other side speaks and is. versions: of the weights now.
    paused: generation is held until a resume.
    pristine: nothing has changed the weights or the optimizer since the base was loaded.
    checkpoint_dir: whether the run can save. lost: why the run is over, None while it lives.
    driver: whether some client holds the driver's lease.
    devices: what it computes on, None where the backend doesn't say.
    """

    instance_id: str = attrs.field(validator=text())
    backend: str = attrs.field(validator=text())
    model: ModelInfo = attrs.field(validator=instance_of(ModelInfo))
    capabilities: Capabilities = attrs.field(validator=instance_of(Capabilities))
    protocol_versions: tuple[int, ...] = attrs.field(
        converter=as_tuple, validator=each(integer(minimum=1))
    )
    software: str = attrs.field(validator=text())
    versions: WeightsVersion = attrs.field(validator=instance_of(WeightsVersion))
    paused: bool = attrs.field(default=False, validator=flag())
    pristine: bool = attrs.field(validator=flag())
    checkpoint_dir: bool = attrs.field(validator=flag())
    driver: bool = attrs.field(validator=flag())
    lost: str | None = attrs.field(default=None, validator=optional(text()))
    devices: Devices | None = attrs.field(default=None, validator=optional(instance_of(Devices)))


@strict
@attrs.frozen(kw_only=True)
class CheckpointList:
    """Checkpoints, oldest first."""

    checkpoints: tuple[CheckpointInfo, ...] = attrs.field(
        converter=as_tuple, validator=each(instance_of(CheckpointInfo))
    )


@strict
@attrs.frozen(kw_only=True)
class FileList:
    """paths: relative, with '/'. sizes: bytes each. identity: what a `ReadFile` gives, so that it
    reads of what was listed, and of nothing that has taken the name since."""

    paths: tuple[str, ...] = attrs.field(converter=as_tuple, validator=each(text()))
    sizes: tuple[int, ...] = attrs.field(converter=as_tuple, validator=each(integer(minimum=0)))
    identity: str = attrs.field(validator=text())


def _bytes(data: Any) -> Any:
    readable = isinstance(data, (bytes, bytearray, memoryview))
    return np.frombuffer(data, np.uint8) if readable else data


@strict
@attrs.frozen(kw_only=True, eq=False)
class FileChunk:
    """data: [length] uint8. size: of the whole file."""

    data: Array = attrs.field(converter=_bytes, validator=instance_of(np.ndarray, wanted="bytes"))
    size: int = attrs.field(converter=plain, validator=integer(minimum=0))


# -- what a run has done ----------------------------------------------------------------------


def _seconds(**default: Any) -> Any:
    return attrs.field(**default, converter=as_float, validator=real())


def _optional(convert: Callable[[Any], Any], validator: Validator) -> Any:
    return attrs.field(default=None, converter=convert, validator=optional(validator))


def _one_more_than_bounds(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    rising = list(instance.bounds) == sorted(set(instance.bounds))
    if not rising or len(value) != len(instance.bounds) + 1:
        refuse(instance, attribute, value, "one count more than the bounds, which rise")


@strict
@attrs.frozen(kw_only=True)
class Distribution:
    """Numbers, counted by their size.

    bounds: [b], rising. counts: [b + 1]; entry i counts those at or below bounds[i] and above the
    bound before it, the last one those above all bounds. total: the sum of all numbers.
    """

    bounds: tuple[float, ...] = attrs.field(converter=as_tuple, validator=each(number()))
    counts: tuple[int, ...] = attrs.field(
        converter=as_tuple, validator=[each(integer(minimum=0)), _one_more_than_bounds]
    )
    total: float = _seconds()

    @property
    def count(self) -> int:
        """How many numbers."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """Their mean, None of none."""
        return self.total / self.count if self.count else None


@strict
@attrs.frozen(kw_only=True)
class OperationStatus:
    """What became of all operations of one name.

    name: of the table. queued: accepted and not begun. running: begun and not ended.
    succeeded: how many. failed: class of the error to how many. refused: the same of submits that
    were not accepted, among them late copies of operations that ended long ago.
    queue_seconds: from acceptance to the beginning. run_seconds: from there to the end, failures
    included. received_bytes, sent_bytes: of the arrays in requests and results.
    """

    name: str = attrs.field(validator=text())
    queued: int = size_field()
    running: int = size_field()
    succeeded: int = size_field()
    failed: Mapping[str, int] = attrs.field(factory=dict, validator=named_counts())
    refused: Mapping[str, int] = attrs.field(factory=dict, validator=named_counts())
    queue_seconds: Distribution = attrs.field(validator=instance_of(Distribution))
    run_seconds: Distribution = attrs.field(validator=instance_of(Distribution))
    received_bytes: int = size_field(default=0)
    sent_bytes: int = size_field(default=0)

    @property
    def ended(self) -> int:
        """How many have an outcome."""
        return self.succeeded + sum(self.failed.values())


@strict
@attrs.frozen(kw_only=True)
class FailureStatus:
    """The last failure. operation: what failed. error: its class. seconds_ago: when."""

    operation: str = attrs.field(validator=text())
    error: str = attrs.field(validator=text())
    seconds_ago: float = _seconds()


@strict
@attrs.frozen(kw_only=True)
class RunStatus:
    """What `Observe` answers: how the run is, and what it has done since it started.

    instance_id, backend, model, software: which run. uptime: its age in seconds.
    versions: of the weights now. driver: whether some client drives it. clients: how many are
    attached, the driver included. paused: generation is held. stopping: it takes nothing new, its
    operator ends it. lost: why it is over, None while it lives.
    kept_bytes: of arrays that are kept for clients: requests that have not ended, results that were
    not acknowledged. busy: how many submits had no room and were sent back to wait.
    operations: those that were asked for at least once, by name.
    generated_samples, generated_tokens: of generates that ended well.
    staleness: of all their samples, in versions: the trainer's when a sample ended, minus the first
    that drew it. recent_mean, recent_max: the same of the last thousand or so, None before any.
    last_failure: None before any.
    """

    instance_id: str = attrs.field(validator=text())
    backend: str = attrs.field(validator=text())
    model: str = attrs.field(validator=text())
    software: str = attrs.field(validator=text())
    uptime: float = _seconds()
    versions: WeightsVersion = attrs.field(validator=instance_of(WeightsVersion))
    driver: bool = attrs.field(validator=flag())
    clients: int = size_field()
    paused: bool = attrs.field(validator=flag())
    stopping: bool = attrs.field(default=False, validator=flag())
    lost: str | None = attrs.field(default=None, validator=optional(text()))
    kept_bytes: int = size_field(default=0)
    busy: int = size_field(default=0)
    operations: tuple[OperationStatus, ...] = attrs.field(
        default=(), converter=as_tuple, validator=each(instance_of(OperationStatus))
    )
    generated_samples: int = size_field(default=0)
    generated_tokens: int = size_field(default=0)
    staleness: Distribution = attrs.field(validator=instance_of(Distribution))
    recent_mean: float | None = _optional(as_float, real())
    recent_max: int | None = _optional(plain, integer(minimum=0))
    last_failure: FailureStatus | None = attrs.field(
        default=None, validator=optional(instance_of(FailureStatus))
    )
