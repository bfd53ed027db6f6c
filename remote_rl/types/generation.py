"""Contract: what sampling gives (imports numpy, attrs, errors, fields, ragged)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

import attrs
import numpy as np

from ..errors import InvalidRequestError
from .arrays import Array, cast_array, to_numpy
from .fields import (
    as_tuple,
    each,
    instance_of,
    integer,
    label,
    number,
    one_of,
    optional,
    plain,
    strict,
)
from .ragged import Ragged

FinishReason: TypeAlias = Literal["stop", "length", "abort"]
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort")
Label: TypeAlias = int | str | None


def _tokens(data: Any) -> Array:
    return cast_array(to_numpy(data).reshape(-1), np.int32, "token ids")


def _logprobs(data: Any) -> Array | None:
    return None if data is None else cast_array(to_numpy(data).reshape(-1), np.float32, "logprobs")


@strict
@attrs.frozen(kw_only=True, eq=False, repr=False)
class Sample:
    """One response.

    tokens:         [t], int32
    logprobs:       [t], float32, of the full vocabulary's distribution at the temperature; or None
    drawn_logprobs: [t], float32, of the truncated distribution it was drawn from; or None
    finish_reason:  "stop" (an end id or a stop string), "length" (max_tokens), "abort"
    first_version, last_version: of the weights that gave the first and the last token
    first_label, label: of the syncs that brought the first and the last of those versions
    prompt_index, index: which prompt of the request, which of its n samples
    """

    tokens: Array = attrs.field(converter=_tokens)
    logprobs: Array | None = attrs.field(default=None, converter=_logprobs)
    drawn_logprobs: Array | None = attrs.field(default=None, converter=_logprobs)
    finish_reason: FinishReason = attrs.field(validator=one_of(FINISH_REASONS))
    first_version: int = attrs.field(converter=plain, validator=integer(minimum=0))
    last_version: int = attrs.field(converter=plain, validator=integer(minimum=0))
    first_label: Label = attrs.field(default=None, converter=plain, validator=label())
    label: Label = attrs.field(default=None, converter=plain, validator=label())
    prompt_index: int = attrs.field(converter=plain, validator=integer(minimum=0))
    index: int = attrs.field(converter=plain, validator=integer(minimum=0))

    def __attrs_post_init__(self) -> None:
        for name in ("logprobs", "drawn_logprobs"):
            field = getattr(self, name)
            if field is not None and len(field) != len(self.tokens):
                raise InvalidRequestError(
                    f"Sample.{name} has {len(field)} entries for {len(self.tokens)} tokens"
                )
        if self.last_version < self.first_version:
            raise InvalidRequestError("Sample.last_version can't be below first_version")

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sample):
            return NotImplemented
        return all(
            np.array_equal(getattr(self, field.name), getattr(other, field.name))
            if isinstance(getattr(self, field.name), np.ndarray)
            else getattr(self, field.name) == getattr(other, field.name)
            for field in attrs.fields(Sample)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        versions = (
            f"version {self.first_version}"
            if self.first_version == self.last_version
            else f"versions {self.first_version}..{self.last_version}"
        )
        return (
            f"Sample(prompt {self.prompt_index}, sample {self.index}: {len(self)} tokens, "
            f"{self.finish_reason}, {versions})"
        )


@strict
@attrs.frozen(kw_only=True, eq=False, repr=False)
class Group:
    """The samples of one prompt.

    prompt: [p], int32. samples: n of them, in order. temperature: the one they were drawn at.
    prompt_index: the prompt's place in the request.
    """

    prompt: Array = attrs.field(converter=_tokens)
    samples: tuple[Sample, ...] = attrs.field(
        converter=as_tuple, validator=each(instance_of(Sample))
    )
    temperature: float = attrs.field(converter=plain, validator=number(minimum=0))
    prompt_index: int = attrs.field(converter=plain, validator=integer(minimum=0))

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Group):
            return NotImplemented
        return (
            np.array_equal(self.prompt, other.prompt)
            and self.samples == other.samples
            and self.temperature == other.temperature
            and self.prompt_index == other.prompt_index
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"Group(prompt {self.prompt_index} of {len(self.prompt)} tokens, "
            f"{len(self.samples)} samples at temperature {self.temperature})"
        )


def _reasons(data: Any) -> Array:
    return cast_array(to_numpy(data).reshape(-1), np.uint8, "Generation.finish_reason")


def _versions(data: Any) -> Array:
    return cast_array(to_numpy(data).reshape(-1), np.int64, "Generation's versions")


def _indices(data: Any) -> Array:
    return cast_array(to_numpy(data).reshape(-1), np.int32, "Generation's indices")


_COLUMNS = (
    "finish_reason",
    "first_version",
    "last_version",
    "first_labels",
    "labels",
    "prompt_index",
    "index",
)


@strict
@attrs.frozen(kw_only=True, eq=False)
class Generation:
    """The answer to a generate as columns: s samples, in the order prompt 0 sample 0, prompt 0
    sample 1, ...; or, as a partial answer, those that have finished since the last one.

    tokens: Ragged[s] int32; logprobs, drawn_logprobs: Ragged[s] float32 or None;
    finish_reason: [s] uint8, an index into FINISH_REASONS; first_version, last_version: [s] int64;
    first_labels, labels: [s]; prompt_index, index: [s] int32.
    """

    tokens: Ragged = attrs.field(validator=instance_of(Ragged))
    logprobs: Ragged | None = attrs.field(default=None, validator=optional(instance_of(Ragged)))
    drawn_logprobs: Ragged | None = attrs.field(
        default=None, validator=optional(instance_of(Ragged))
    )
    finish_reason: Array = attrs.field(converter=_reasons)
    first_version: Array = attrs.field(converter=_versions)
    last_version: Array = attrs.field(converter=_versions)
    first_labels: tuple[Label, ...] = attrs.field(converter=as_tuple, validator=each(label()))
    labels: tuple[Label, ...] = attrs.field(converter=as_tuple, validator=each(label()))
    prompt_index: Array = attrs.field(converter=_indices)
    index: Array = attrs.field(converter=_indices)

    def __attrs_post_init__(self) -> None:
        for name in _COLUMNS:
            column = getattr(self, name)
            if len(column) != len(self.tokens):
                raise InvalidRequestError(
                    f"Generation.{name} has {len(column)} entries for {len(self.tokens)} samples",
                    field=name,
                )
        for name in ("logprobs", "drawn_logprobs"):
            field: Ragged | None = getattr(self, name)
            if field is not None and not np.array_equal(field.offsets, self.tokens.offsets):
                raise InvalidRequestError(
                    f"Generation.{name} and Generation.tokens differ in their rows' lengths",
                    field=name,
                )
        if len(self) and int(self.finish_reason.max()) >= len(FINISH_REASONS):
            raise InvalidRequestError(
                f"Generation.finish_reason holds {self.finish_reason.max()}, which stands for none "
                f"of {', '.join(FINISH_REASONS)}",
                field="finish_reason",
            )

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def from_samples(cls, samples: Sequence[Sample]) -> Generation:
        """The columns of these samples."""
        return cls(
            tokens=Ragged.from_rows((sample.tokens for sample in samples), np.int32),
            logprobs=_column(samples, "logprobs"),
            drawn_logprobs=_column(samples, "drawn_logprobs"),
            finish_reason=np.array(
                [FINISH_REASONS.index(sample.finish_reason) for sample in samples], np.uint8
            ),
            first_version=np.array([sample.first_version for sample in samples], np.int64),
            last_version=np.array([sample.last_version for sample in samples], np.int64),
            first_labels=[sample.first_label for sample in samples],
            labels=[sample.label for sample in samples],
            prompt_index=np.array([sample.prompt_index for sample in samples], np.int32),
            index=np.array([sample.index for sample in samples], np.int32),
        )

    def samples(self) -> Iterator[Sample]:
        """The samples as objects; token arrays are views into the columns."""
        for row in range(len(self)):
            yield Sample(
                tokens=self.tokens[row],
                logprobs=None if self.logprobs is None else self.logprobs[row],
                drawn_logprobs=None if self.drawn_logprobs is None else self.drawn_logprobs[row],
                finish_reason=FINISH_REASONS[self.finish_reason[row]],
                first_version=self.first_version[row],
                last_version=self.last_version[row],
                first_label=self.first_labels[row],
                label=self.labels[row],
                prompt_index=self.prompt_index[row],
                index=self.index[row],
            )

    def groups(self, prompts: Ragged, temperature: float) -> tuple[Group, ...]:
        """One group a prompt, in the prompts' order."""
        members: list[list[Sample]] = [[] for _ in range(len(prompts))]
        for sample in self.samples():
            members[sample.prompt_index].append(sample)
        return tuple(
            Group(prompt=prompt, samples=some, temperature=temperature, prompt_index=index)
            for index, (prompt, some) in enumerate(zip(prompts, members))
        )


def _column(samples: Sequence[Sample], name: str) -> Ragged | None:
    rows = [getattr(sample, name) for sample in samples]
    if not rows or any(row is None for row in rows):
        return None
    return Ragged.from_rows(rows, np.float32)
