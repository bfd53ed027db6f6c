"""Contract: one request class for each operation (imports errors, fields, losses' base, types).

`ops.py` says which operation each belongs to. `requirements()` names what a backend must declare
for the request to be legal; the client refuses anything missing before it is sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias

import attrs
import numpy as np

from .errors import InvalidRequestError
from .losses import Loss
from .types.batch import Batch
from .types.fields import (
    RESERVED,
    SCHEDULING,
    SEMANTIC,
    as_names,
    as_tuple,
    each,
    flag,
    instance_of,
    json_mapping,
    one_of,
    only_default,
    optional,
    strict,
    text,
)
from .types.generation import Label, SamplingParams
from .types.ragged import Ragged, RaggedLike
from .types.results import AdamW, Tensor

InFlight: TypeAlias = Literal["keep", "wait", "abort"]
Half: TypeAlias = Literal["training", "sampling"]
FileKind: TypeAlias = Literal["checkpoint", "export"]
#: (kind, name): what a backend must declare, e.g. ("loss", "PPO")
Requirement: TypeAlias = tuple[str, str]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
RESERVED_NAMES = frozenset({"base", "current", "reference"})


def _name(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, str) or not _NAME.fullmatch(value) or value in RESERVED_NAMES:
        raise InvalidRequestError(
            f"{type(instance).__name__}.{attribute.name} can't be {value!r}: a name has 1 to 128 "
            "letters, digits, '.', '_' or '-', begins with a letter or digit, and is none of "
            f"{', '.join(sorted(RESERVED_NAMES))}",
            field=attribute.name,
        )


def _policy(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value not in ("current", "reference"):
        _name(instance, attribute, value)


def _model() -> Any:
    return attrs.field(
        default="policy",
        metadata=RESERVED,
        validator=only_default("policy", "a run holds one model today"),
    )


def _label(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if isinstance(value, bool) or not (value is None or isinstance(value, (int, str))):
        raise InvalidRequestError(
            f"{type(instance).__name__}.label must be a whole number, a string or None, "
            f"not {value!r}",
            field="label",
        )


@strict
@attrs.frozen(kw_only=True)
class Request:
    """Base of all requests."""

    def requirements(self) -> Iterator[Requirement]:
        """What the backend must declare besides the operation itself."""
        return iter(())


# -- training -------------------------------------------------------------------------------


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
    policy: str = attrs.field(default="current", metadata=SEMANTIC, validator=_policy)
    model: str = _model()

    def requirements(self) -> Iterator[Requirement]:
        yield from (("output", name) for name in sorted(self.outputs))


@strict
@attrs.frozen(kw_only=True)
class ForwardBackward(Request):
    """Adds the gradient of `loss` on `batch` to the accumulator."""

    batch: Batch = attrs.field(metadata=SEMANTIC, validator=instance_of(Batch))
    loss: Loss = attrs.field(
        metadata=SEMANTIC, validator=instance_of(Loss, wanted="a loss of remote_rl.losses")
    )
    model: str = _model()

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
    model: str = _model()

    def requirements(self) -> Iterator[Requirement]:
        yield ("optimizer", type(self.optimizer).__name__)


@strict
@attrs.frozen(kw_only=True)
class ZeroGrad(Request):
    """Discards the accumulated gradient, and with it an earlier failure."""

    model: str = _model()


@strict
@attrs.frozen(kw_only=True)
class Snapshot(Request):
    """Keeps the current weights under a name, for forward, restore and reference."""

    name: str = attrs.field(metadata=SEMANTIC, validator=_name)
    model: str = _model()


@strict
@attrs.frozen(kw_only=True)
class RestoreSnapshot(Request):
    """Makes a snapshot's weights the current ones; clears the accumulator."""

    name: str = attrs.field(metadata=SEMANTIC, validator=_name)
    model: str = _model()


@strict
@attrs.frozen(kw_only=True)
class DropSnapshot(Request):
    """Forgets a snapshot."""

    name: str = attrs.field(metadata=SEMANTIC, validator=_name)
    model: str = _model()


def _reference_source(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value not in ("base", "current"):
        _name(instance, attribute, value)


@strict
@attrs.frozen(kw_only=True)
class SetReference(Request):
    """Sets the reference policy to "base", "current" or a snapshot's weights."""

    source: str = attrs.field(metadata=SEMANTIC, validator=_reference_source)
    model: str = _model()


@strict
@attrs.frozen(kw_only=True)
class Save(Request):
    """Writes a checkpoint. An existing name and a non-empty accumulator are refused."""

    name: str = attrs.field(metadata=SEMANTIC, validator=_name)
    metadata: Mapping[str, Any] = attrs.field(
        factory=dict, metadata=SEMANTIC, converter=json_mapping, validator=instance_of(dict)
    )
    optimizer: bool = attrs.field(default=True, metadata=SEMANTIC, validator=flag())
    model: str = _model()


@strict
@attrs.frozen(kw_only=True)
class Load(Request):
    """Restores a checkpoint; with optimizer=False the optimizer is a new run's."""

    name: str = attrs.field(metadata=SEMANTIC, validator=_name)
    optimizer: bool = attrs.field(default=True, metadata=SEMANTIC, validator=flag())
    model: str = _model()


@strict
@attrs.frozen(kw_only=True)
class Checkpoints(Request):
    """Lists the run's checkpoints, oldest first."""

    model: str = _model()


@strict
@attrs.frozen(kw_only=True)
class Delete(Request):
    """Removes a checkpoint."""

    name: str = attrs.field(metadata=SEMANTIC, validator=_name)
    model: str = _model()


@strict
@attrs.frozen(kw_only=True)
class Export(Request):
    """Writes the current weights as a Hugging Face directory on the backend's side."""

    name: str = attrs.field(metadata=SEMANTIC, validator=_name)
    model: str = _model()


@strict
@attrs.frozen(kw_only=True)
class Abandon(Request):
    """Fills a number that was reserved for a forward_backward whose client-side loss raised; it
    counts as that forward_backward's failure."""

    reason: str = attrs.field(metadata=SEMANTIC, validator=text())
    model: str = _model()


# -- sampling -------------------------------------------------------------------------------


def _prompts(data: RaggedLike) -> Ragged:
    return Ragged.of(data, np.int32, "prompts")


@strict
@attrs.frozen(kw_only=True)
class Generate(Request):
    """Draws params.n responses to each prompt; prompts are token ids, Ragged[m] int32."""

    prompts: Ragged = attrs.field(metadata=SEMANTIC, converter=_prompts)
    params: SamplingParams = attrs.field(
        metadata=SEMANTIC, validator=instance_of(SamplingParams, wanted="a SamplingParams")
    )
    model: str = _model()

    def __attrs_post_init__(self) -> None:
        if len(self.prompts) == 0:
            raise InvalidRequestError("generate needs at least one prompt", field="prompts")
        if not self.prompts.lengths.all():
            row = int(np.argmin(self.prompts.lengths))
            raise InvalidRequestError(f"prompt {row} is empty; give it one token", row=row)
        if self.prompts.values.min() < 0:
            row = int(self.prompts.row_numbers()[np.argmin(self.prompts.values)])
            raise InvalidRequestError(f"prompt {row} holds a negative token id", row=row)

    def requirements(self) -> Iterator[Requirement]:
        params, defaults = self.params, attrs.fields(SamplingParams)
        for field in defaults:
            if field.name not in ("n", "max_tokens", "outputs") and (
                getattr(params, field.name) != field.default
            ):
                yield ("sampling_option", field.name)
        for name in sorted(params.outputs):
            yield ("sampling_output", name)


@strict
@attrs.frozen(kw_only=True)
class FinishSession(Request):
    """Says that no more requests of this session_id come, so that its cache may go."""

    session_id: str = attrs.field(metadata=SCHEDULING, validator=text())
    model: str = _model()


@strict
@attrs.frozen(kw_only=True)
class Abort(Request):
    """Ends generates early with finish_reason "abort": those with these request ids, or, with
    None, all that were accepted before."""

    request_ids: tuple[str, ...] | None = attrs.field(
        default=None,
        metadata=SEMANTIC,
        converter=attrs.converters.optional(as_tuple),
        validator=optional(each(text())),
    )
    model: str = _model()


@strict
@attrs.frozen(kw_only=True)
class Pause(Request):
    """Holds generation at the next token; requests in flight wait for `Resume`."""

    model: str = _model()


@strict
@attrs.frozen(kw_only=True)
class Resume(Request):
    """Lets generation go on."""

    model: str = _model()


@strict
@attrs.frozen(kw_only=True)
class ResetPrefixCache(Request):
    """Drops what the sampler cached of earlier prompts."""

    model: str = _model()


# -- weights --------------------------------------------------------------------------------


@strict
@attrs.frozen(kw_only=True)
class Sync(Request):
    """Carries the trainer's weights to the sampler.

    in_flight: what happens to running generates: "keep" (go on with the new weights), "wait"
    (finish first), "abort". label: a framework's own step, passed on to samples.
    """

    in_flight: InFlight = attrs.field(
        default="keep", metadata=SEMANTIC, validator=one_of(("keep", "wait", "abort"))
    )
    label: Label = attrs.field(default=None, metadata=SEMANTIC, validator=_label)
    model: str = _model()

    def requirements(self) -> Iterator[Requirement]:
        yield ("in_flight", self.in_flight)


def _tensors(data: Any) -> Mapping[str, Tensor]:
    if not isinstance(data, Mapping) or not data:
        raise InvalidRequestError("push needs a mapping of names to tensors", field="tensors")
    return {str(name): Tensor.of(tensor) for name, tensor in data.items()}


@strict
@attrs.frozen(kw_only=True)
class Push(Request):
    """Carries a client's own tensors to the sampler: every tensor of the model, by name."""

    tensors: Mapping[str, Tensor] = attrs.field(metadata=SEMANTIC, converter=_tensors)
    in_flight: InFlight = attrs.field(
        default="keep", metadata=SEMANTIC, validator=one_of(("keep", "wait", "abort"))
    )
    label: Label = attrs.field(default=None, metadata=SEMANTIC, validator=_label)
    model: str = _model()

    def requirements(self) -> Iterator[Requirement]:
        yield ("in_flight", self.in_flight)
        yield from (
            ("push_dtype", dtype)
            for dtype in sorted({tensor.dtype for tensor in self.tensors.values()})
        )


@strict
@attrs.frozen(kw_only=True)
class Version(Request):
    """Asks which versions trainer and sampler hold."""

    model: str = _model()


# -- session --------------------------------------------------------------------------------


@strict
@attrs.frozen(kw_only=True)
class Info(Request):
    """Asks what the run is and what its backend offers."""


@strict
@attrs.frozen(kw_only=True)
class Tokenizer(Request):
    """Asks for the tokenizer's files."""


@strict
@attrs.frozen(kw_only=True)
class Reset(Request):
    """Back to the base weights: optimizer, seeds, reference and snapshots too."""


@strict
@attrs.frozen(kw_only=True)
class Sleep(Request):
    """Lets one half give its memory back; an operation that needs it wakes it."""

    half: Half = attrs.field(metadata=SCHEDULING, validator=one_of(("training", "sampling")))


@strict
@attrs.frozen(kw_only=True)
class Wake(Request):
    """Wakes one half before it is needed."""

    half: Half = attrs.field(metadata=SCHEDULING, validator=one_of(("training", "sampling")))


@strict
@attrs.frozen(kw_only=True)
class ListFiles(Request):
    """Names and sizes of the files of a checkpoint or export."""

    kind: FileKind = attrs.field(metadata=SEMANTIC, validator=one_of(("checkpoint", "export")))
    name: str = attrs.field(metadata=SEMANTIC, validator=_name)


@strict
@attrs.frozen(kw_only=True)
class ReadFile(Request):
    """`length` bytes of one of those files, from `offset`."""

    kind: FileKind = attrs.field(metadata=SEMANTIC, validator=one_of(("checkpoint", "export")))
    name: str = attrs.field(metadata=SEMANTIC, validator=_name)
    path: str = attrs.field(metadata=SEMANTIC, validator=text())
    offset: int = attrs.field(metadata=SEMANTIC)
    length: int = attrs.field(metadata=SEMANTIC)
