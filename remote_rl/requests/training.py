"""Contract: requests of the training face (imports the contract's types and losses)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from ..losses import Loss
from ..types.batch import Batch
from ..types.fields import (
    SEMANTIC,
    as_names,
    each,
    flag,
    instance_of,
    json_mapping,
    json_values,
    one_of,
    strict,
    text,
)
from ..types.results import AdamW
from .base import FileKind, Request, Requirement, check_name, check_policy, model_field


@strict
@attrs.frozen(kw_only=True)
class Forward(Request):
    """Per-token outputs of the policy without a gradient.

    outputs: names, e.g. {"logprobs", "entropy"}. policy: "current", "reference" or a snapshot.
    """

    batch: Batch = attrs.field(metadata=SEMANTIC, validator=instance_of(Batch))
    outputs: frozenset[str] = attrs.field(
        default=frozenset({"logprobs"}),
        metadata=SEMANTIC,
        converter=as_names,
        validator=each(text()),
    )
    policy: str = attrs.field(default="current", metadata=SEMANTIC, validator=check_policy)
    model: str = model_field()

    def requirements(self) -> Iterator[Requirement]:
        yield from (("output", name) for name in sorted(self.outputs))
        if self.policy != "current":
            yield ("policy", "reference" if self.policy == "reference" else "snapshot")


@strict
@attrs.frozen(kw_only=True)
class ForwardBackward(Request):
    """Adds the gradient of `loss` on `batch` to the accumulator."""

    batch: Batch = attrs.field(metadata=SEMANTIC, validator=instance_of(Batch))
    loss: Loss = attrs.field(
        metadata=SEMANTIC, validator=instance_of(Loss, wanted="a loss of remote_rl.losses")
    )
    model: str = model_field()

    def requirements(self) -> Iterator[Requirement]:
        yield ("loss", type(self.loss).__name__)
        yield from (("output", name) for name in sorted(self.loss.required_outputs))


@strict
@attrs.frozen(kw_only=True)
class OptimStep(Request):
    """Applies the accumulated gradient and clears it."""

    optimizer: AdamW = attrs.field(
        metadata=SEMANTIC, validator=instance_of(AdamW, wanted="an AdamW")
    )
    model: str = model_field()

    def requirements(self) -> Iterator[Requirement]:
        yield ("optimizer", type(self.optimizer).__name__)


@strict
@attrs.frozen(kw_only=True)
class ZeroGrad(Request):
    """Discards the accumulated gradient, and with it an earlier failure."""

    model: str = model_field()


@strict
@attrs.frozen(kw_only=True)
class Snapshot(Request):
    """Keeps the current weights under a name, for forward, restore and reference."""

    name: str = attrs.field(metadata=SEMANTIC, validator=check_name)
    model: str = model_field()


@strict
@attrs.frozen(kw_only=True)
class RestoreSnapshot(Request):
    """Makes a snapshot's weights the current ones; clears the accumulator."""

    name: str = attrs.field(metadata=SEMANTIC, validator=check_name)
    model: str = model_field()


@strict
@attrs.frozen(kw_only=True)
class DropSnapshot(Request):
    """Forgets a snapshot."""

    name: str = attrs.field(metadata=SEMANTIC, validator=check_name)
    model: str = model_field()


def _reference_source(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value not in ("base", "current"):
        check_name(instance, attribute, value)


@strict
@attrs.frozen(kw_only=True)
class SetReference(Request):
    """Sets the reference policy to "base", "current" or a snapshot's weights."""

    source: str = attrs.field(metadata=SEMANTIC, validator=_reference_source)
    model: str = model_field()

    def requirements(self) -> Iterator[Requirement]:
        yield ("policy", "reference")
        if self.source not in ("base", "current"):
            yield ("policy", "snapshot")


@strict
@attrs.frozen(kw_only=True)
class Save(Request):
    """Writes a checkpoint. An existing name and a non-empty accumulator are refused."""

    name: str = attrs.field(metadata=SEMANTIC, validator=check_name)
    metadata: Mapping[str, Any] = attrs.field(
        factory=dict, metadata=SEMANTIC, converter=json_mapping, validator=json_values()
    )
    optimizer: bool = attrs.field(default=True, metadata=SEMANTIC, validator=flag())
    model: str = model_field()


@strict
@attrs.frozen(kw_only=True)
class Load(Request):
    """Restores a checkpoint; with optimizer=False the optimizer is a new run's."""

    name: str = attrs.field(metadata=SEMANTIC, validator=check_name)
    optimizer: bool = attrs.field(default=True, metadata=SEMANTIC, validator=flag())
    model: str = model_field()


@strict
@attrs.frozen(kw_only=True)
class Checkpoints(Request):
    """Lists the run's checkpoints, oldest first."""

    model: str = model_field()


@strict
@attrs.frozen(kw_only=True)
class Delete(Request):
    """Removes a checkpoint, or an export."""

    name: str = attrs.field(metadata=SEMANTIC, validator=check_name)
    kind: FileKind = attrs.field(
        default="checkpoint", metadata=SEMANTIC, validator=one_of(("checkpoint", "export"))
    )
    model: str = model_field()


@strict
@attrs.frozen(kw_only=True)
class Export(Request):
    """Writes the current weights as a Hugging Face directory on the backend's side."""

    name: str = attrs.field(metadata=SEMANTIC, validator=check_name)
    model: str = model_field()


@strict
@attrs.frozen(kw_only=True)
class Abandon(Request):
    """Fills a number that was reserved for a forward_backward whose client-side loss raised; it
    counts as that forward_backward's failure."""

    reason: str = attrs.field(metadata=SEMANTIC, validator=text())
    model: str = model_field()
