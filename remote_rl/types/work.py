"""Contract: what an operation has computed, on which devices, and how well these were used (imports
attrs, errors and fields)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from ..errors import InvalidRequestError
from .fields import integer, number, optional, plain, strict, text
from .result_fields import as_float, size_field


def _rate(**bounds: float) -> Any:
    return attrs.field(converter=as_float, validator=optional(number(**bounds)))


def _reason() -> Any:
    return attrs.field(default=None, validator=optional(text()))


def _check_reason(instance: Any, name: str, value: float | None) -> None:
    """A number that is unknown comes with the reason, a known one without."""
    if (value is None) == (instance.reason is None):
        cls = type(instance).__name__
        raise InvalidRequestError(
            f"{cls} needs {name}, or the reason why it is unknown, and not both", field="reason"
        )


@strict
@attrs.frozen(kw_only=True)
class Work:
    """What one operation has computed, by the backend's own count.

    tokens: positions that went through the model. A prompt that several responses of the batch
    share counts once, and so does one that the backend computes again for another piece of the
    batch: the number does not depend on micro-batches or ranks. 0 for an optimizer's step.
    flops: floating-point operations that the model needs for them (`types.flops` has the
    formula for decoders); nothing that is computed again counts twice, as in the MFU of
    arXiv:2204.02311, appendix B. A multiplication and an addition are two. None where unknown.
    seconds: of computing, from the first to the last operation on the devices; neither queue nor
    transport. It is measured, so two works that differ in nothing else are equal.
    reason: why `flops` is unknown, else None.
    """

    tokens: int = size_field()
    flops: float | None = _rate(minimum=0)
    seconds: float = attrs.field(converter=as_float, validator=number(minimum=0), eq=False)
    reason: str | None = _reason()

    def __attrs_post_init__(self) -> None:
        _check_reason(self, "flops", self.flops)

    @staticmethod
    def total(works: Iterable[Work | None]) -> Work | None:
        """The sum of several operations' work; None where one has none, or there are none."""
        held = list(works)
        known = [each for each in held if each is not None]
        if not known or len(known) < len(held):
            return None
        return Work(
            tokens=sum(each.tokens for each in known),
            flops=None if any(each.flops is None for each in known) else sum(map(_flops, known)),
            seconds=sum(each.seconds for each in known),
            reason=next((each.reason for each in known if each.reason is not None), None),
        )


def _flops(work: Work) -> float:
    assert work.flops is not None
    return work.flops


@strict
@attrs.frozen(kw_only=True)
class Devices:
    """What a run computes on.

    kind: the name that the devices give themselves ("NVIDIA H200", "cpu"). count: those that
    train. total: those of the whole run, the sampler's own included; `count` by default.
    dtype: of the products in training, as in torch ("bfloat16").
    peak_flops: floating-point operations a second that the maker promises of one device for dense
    products of that dtype, None where unknown. `types.peaks` knows some devices by name.
    reason: why `peak_flops` is unknown, else None.
    """

    kind: str = attrs.field(validator=text())
    count: int = attrs.field(converter=plain, validator=integer(minimum=1))
    total: int = attrs.field(converter=plain, validator=integer(minimum=1))
    dtype: str = attrs.field(validator=text())
    peak_flops: float | None = _rate(above=0)
    reason: str | None = _reason()

    @total.default
    def _only_those_that_train(self) -> int:
        return self.count

    def __attrs_post_init__(self) -> None:
        _check_reason(self, "peak_flops", self.peak_flops)
        if self.total < self.count:
            raise InvalidRequestError(
                f"Devices.total is {self.total}, less than the {self.count} that train",
                field="total",
            )


def mfu(work: Work | None, devices: Devices | None) -> tuple[float | None, str | None]:
    """Model FLOPs utilisation (arXiv:2204.02311, appendix B) of the devices that train, and None:
    `work.flops` by what they could have done in `work.seconds`, from 0 to 1. Where it can't be
    known: None, and the reason.

    work: of a result, or the `Work.total` of several. devices: of the run's `info`.
    """
    if work is None:
        return None, "the backend does not count what it computes"
    if work.flops is None:
        return None, work.reason
    if devices is None:
        return None, "the backend does not say which devices it computes on"
    if devices.peak_flops is None:
        return None, devices.reason
    if work.seconds == 0:
        return None, "no time was measured"
    return work.flops / (work.seconds * devices.count * devices.peak_flops), None
