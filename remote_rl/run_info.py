"""Contract: what a run says of itself and of its files (imports protocol and types)."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from .protocol import Capabilities, ModelInfo
from .types.arrays import Array
from .types.fields import (
    as_tuple,
    each,
    flag,
    instance_of,
    integer,
    optional,
    plain,
    strict,
    text,
)
from .types.results import CheckpointInfo, WeightsVersion


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
    """paths: relative, with '/'. sizes: bytes each."""

    paths: tuple[str, ...] = attrs.field(converter=as_tuple, validator=each(text()))
    sizes: tuple[int, ...] = attrs.field(converter=as_tuple, validator=each(integer(minimum=0)))


def _bytes(data: Any) -> Any:
    readable = isinstance(data, (bytes, bytearray, memoryview))
    return np.frombuffer(data, np.uint8) if readable else data


@strict
@attrs.frozen(kw_only=True, eq=False)
class FileChunk:
    """data: [length] uint8. size: of the whole file."""

    data: Array = attrs.field(converter=_bytes, validator=instance_of(np.ndarray, wanted="bytes"))
    size: int = attrs.field(converter=plain, validator=integer(minimum=0))
