"""Contract: what a training operation is given (imports numpy, attrs, errors, fields, ragged)."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import attrs
import numpy as np

from ..errors import InvalidRequestError
from . import batch_fields
from .arrays import Array, row_indices
from .batch_fields import PER_TOKEN_FLOATS
from .fields import LOCAL, RESERVED, SEMANTIC, only_default, strict
from .generation import Group
from .ragged import Ragged

_RESERVED_HINT = "prefix trees and multimodal chunks are not part of this version"


@strict
@attrs.frozen(kw_only=True, eq=False, repr=False)
class Batch:
    """n responses over m prompts, each prompt once; no padding, no shift.

    prompts:            Ragged[m], int32, token ids
    prompt_index:       [n], int32, which prompt each response continues
    responses:          Ragged[n], int32, everything after the prompt, tool tokens included
    temperature:        [n], float32, 1e-4 to 1e4; a scalar is broadcast; 0 (greedy) counts as 1
    mask:               Ragged[n], uint8, 1 where the loss counts the token; None means all ones
    importance_weights: Ragged[n], float32, multiplies the policy term, never a denominator
    advantages:         Ragged[n], float32; both may be given as [n], one value a response
    old_logprobs, ref_logprobs: Ragged[n], float32, optional
    sampling_logprobs:  Ragged[n], float32, optional; never sent
    policy_version:     [n], int64, the first version that sampled the response; never sent
    extras:             mapping of name to array[n], the loop's own columns; never sent
    prompt_parent, attachments: reserved, None

    Entry t of a per-token field belongs to response token t, and its logprob is that of token t
    given all before it. Raises `InvalidRequestError`, naming field and row, where lengths
    disagree, a float is NaN or infinite, or an id is negative.
    """

    prompts: Ragged = attrs.field(metadata=SEMANTIC, converter=batch_fields.prompts)
    prompt_index: Array = attrs.field(metadata=SEMANTIC, converter=batch_fields.prompt_index)
    responses: Ragged = attrs.field(metadata=SEMANTIC, converter=batch_fields.responses)
    temperature: Array = attrs.field(metadata=SEMANTIC, converter=batch_fields.temperature)
    mask: Ragged = attrs.field(
        default=None,
        metadata=SEMANTIC,
        converter=batch_fields.mask,
    )
    importance_weights: Ragged | None = attrs.field(
        default=None, metadata=SEMANTIC, converter=batch_fields.importance_weights
    )
    advantages: Ragged | None = attrs.field(
        default=None, metadata=SEMANTIC, converter=batch_fields.advantages
    )
    old_logprobs: Ragged | None = attrs.field(
        default=None, metadata=SEMANTIC, converter=batch_fields.old_logprobs
    )
    ref_logprobs: Ragged | None = attrs.field(
        default=None, metadata=SEMANTIC, converter=batch_fields.ref_logprobs
    )
    sampling_logprobs: Ragged | None = attrs.field(
        default=None, metadata=LOCAL, converter=batch_fields.sampling_logprobs
    )
    policy_version: Array | None = attrs.field(
        default=None, metadata=LOCAL, converter=batch_fields.policy_version
    )
    extras: Mapping[str, Array] = attrs.field(factory=dict, metadata=LOCAL)
    prompt_parent: None = attrs.field(
        default=None, metadata=RESERVED, validator=only_default(None, _RESERVED_HINT)
    )
    attachments: None = attrs.field(
        default=None, metadata=RESERVED, validator=only_default(None, _RESERVED_HINT)
    )

    def __attrs_post_init__(self) -> None:
        rows = len(self.responses)
        if cast(Any, self.mask) is None:
            ones = np.ones(len(self.responses.values), np.uint8)
            object.__setattr__(self, "mask", self.responses.with_values(ones))
        if len(self.temperature) == 1 and rows != 1:
            repeated = np.broadcast_to(self.temperature, (rows,))
            object.__setattr__(self, "temperature", repeated)
        for name in batch_fields.ONE_A_RESPONSE:
            given = getattr(self, name)
            if isinstance(given, np.ndarray):
                held = batch_fields.spread(given, self.responses, name)
                object.__setattr__(self, name, held)
        batch_fields.check_rows(self, rows)
        batch_fields.check_values(self)
        if not self.temperature.all():
            fixed = np.where(self.temperature == 0, np.float32(1), self.temperature)
            object.__setattr__(self, "temperature", fixed)
        object.__setattr__(self, "extras", batch_fields.checked_extras(self.extras, rows))

    # -- building and reshaping ---------------------------------------------------------------

    @classmethod
    def from_groups(
        cls,
        groups: Iterable[Group] | Group,
        *,
        advantages: Any = None,
        extras: Mapping[str, Any] | None = None,
    ) -> Batch:
        """The batch of all samples of `groups`, in order, each group's prompt shared.

        advantages: [n] or [groups, samples], one a sample, or per token (rows or Ragged), or None.
        Mask (ones), temperature, policy version, `sampling_logprobs` and `old_logprobs`
        come from the samples; the logprobs are left None where a sample has none. Equal prompts
        of different groups stay apart; see `share_prompts`.
        """
        if isinstance(groups, Group):
            groups = [groups]
        several = list(groups)
        if not all(isinstance(group, Group) for group in several):
            raise InvalidRequestError(
                "Batch.from_groups takes the groups that generate(...).result() returns",
                field="groups",
            )
        samples = [sample for group in several for sample in group.samples]
        responses = Ragged.from_rows((sample.tokens for sample in samples), np.int32)
        logprobs = None
        if all(sample.logprobs is not None for sample in samples):
            logprobs = Ragged.from_rows((sample.logprobs for sample in samples), np.float32)
        sizes = [len(group.samples) for group in several]
        return cls(
            prompts=Ragged.from_rows((group.prompt for group in several), np.int32),
            prompt_index=np.repeat(np.arange(len(several), dtype=np.int32), sizes),
            responses=responses,
            temperature=np.repeat([np.float32(group.temperature) for group in several], sizes),
            advantages=_flattened(advantages, sizes),
            old_logprobs=logprobs,
            sampling_logprobs=logprobs,
            policy_version=np.array([sample.first_version for sample in samples], np.int64),
            extras=extras or {},
        )

    def select(self, rows: Any) -> Batch:
        """The rows at these indices (or where a boolean mask is true), in that order, with the
        prompts they need, still shared."""
        chosen = row_indices(rows, len(self))
        used, index = np.unique(self.prompt_index[chosen], return_inverse=True)
        changed: dict[str, Any] = {
            "prompts": self.prompts.select(used),
            "prompt_index": index.reshape(-1).astype(np.int32),
            "extras": {name: column[chosen] for name, column in self.extras.items()},
        }
        for name in ("responses", "mask", *PER_TOKEN_FLOATS):
            field = getattr(self, name)
            changed[name] = None if field is None else field.select(chosen)
        for name in ("temperature", "policy_version"):
            column = getattr(self, name)
            changed[name] = None if column is None else column[chosen]
        return attrs.evolve(self, **changed)

    def split(self, sizes: int | Sequence[int]) -> tuple[Batch, ...]:
        """Consecutive pieces of `sizes` rows each; one number gives pieces of that many rows,
        the last one perhaps shorter."""
        if isinstance(sizes, (int, np.integer)):
            if sizes < 1:
                raise InvalidRequestError(f"a piece needs at least 1 row, not {sizes}")
            starts = range(0, len(self), sizes)
            sizes = [min(sizes, len(self) - start) for start in starts]
        if sum(sizes) != len(self) or any(size < 0 for size in sizes):
            raise InvalidRequestError(f"sizes {list(sizes)} do not add up to {len(self)} rows")
        bounds = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        return tuple(
            self.select(np.arange(start, stop)) for start, stop in itertools.pairwise(bounds)
        )

    @classmethod
    def concat(cls, parts: Iterable[Batch]) -> Batch:
        """All rows of all parts. Every part must have the same fields and extras."""
        several = list(parts)
        if not several:
            raise InvalidRequestError("Batch.concat needs at least one batch")
        bases = np.concatenate([[0], np.cumsum([len(part.prompts) for part in several])])
        joined: dict[str, Any] = {
            "prompts": Ragged.concat(part.prompts for part in several),
            "prompt_index": np.concatenate(
                [part.prompt_index + np.int32(base) for part, base in zip(several, bases)]
            ),
        }
        for name in ("responses", "mask", *PER_TOKEN_FLOATS):
            fields = _all_or_none(name, [getattr(part, name) for part in several])
            joined[name] = None if fields is None else Ragged.concat(fields)
        for name in ("temperature", "policy_version"):
            columns = _all_or_none(name, [getattr(part, name) for part in several])
            joined[name] = None if columns is None else np.concatenate(columns)
        joined["extras"] = _joined_extras([part.extras for part in several])
        return cls(**joined)

    def share_prompts(self) -> Batch:
        """The same batch with prompts of equal tokens sent once."""
        first: dict[bytes, int] = {}
        place = np.empty(len(self.prompts), np.int32)
        kept: list[int] = []
        for index, prompt in enumerate(self.prompts):
            key = prompt.tobytes()
            if key not in first:
                first[key] = len(kept)
                kept.append(index)
            place[index] = first[key]
        return attrs.evolve(
            self, prompts=self.prompts.select(kept), prompt_index=place[self.prompt_index]
        )

    def replace(self, **fields: Any) -> Batch:
        """A copy with other values for some fields, checked as a new batch is."""
        return attrs.evolve(self, **fields)

    def only(self, fields: Iterable[str]) -> Batch:
        """What is sent: the tokens and those per-token fields that `fields` names. The same arrays,
        not checked again."""
        wanted = set(fields)
        kept = copy.copy(self)  # without the constructor, which reads every token
        for name in PER_TOKEN_FLOATS:
            if name not in wanted:
                object.__setattr__(kept, name, None)
        object.__setattr__(kept, "policy_version", None)
        object.__setattr__(kept, "extras", {})
        return kept

    # -- reading ----------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.responses)

    def staleness(self, version: int) -> Array:
        """[n] int64: how many versions lie between the one that first sampled each response and
        `version` (the trainer's, as a rule)."""
        if self.policy_version is None:
            raise InvalidRequestError(
                "this batch has no policy_version; Batch.from_groups sets it from the samples",
                field="policy_version",
            )
        return version - self.policy_version

    @property
    def tokens(self) -> int:
        """Prompt and response tokens, each prompt counted once."""
        return len(self.prompts.values) + len(self.responses.values)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Batch):
            return NotImplemented
        names = [field.name for field in attrs.fields(Batch) if field.name != "extras"]
        return (
            all(_same(getattr(self, name), getattr(other, name)) for name in names)
            and self.extras.keys() == other.extras.keys()
            and all(_same(column, other.extras[name]) for name, column in self.extras.items())
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        present = [name for name in PER_TOKEN_FLOATS if getattr(self, name) is not None]
        return (
            f"Batch({len(self)} responses over {len(self.prompts)} prompts, {self.tokens} tokens, "
            f"{int(self.mask.values.sum())} counted"
            + (f", with {', '.join(present)}" if present else "")
            + (f", extras {', '.join(self.extras)}" if self.extras else "")
            + ")"
        )


def _flattened(advantages: Any, sizes: list[int]) -> Any:
    """[groups, samples of each] as [n]; anything else as it is."""
    if isinstance(advantages, (list, tuple)) and len(advantages) == len(sizes) < sum(sizes):
        lengths = [len(row) if hasattr(row, "__len__") else -1 for row in advantages]
        if lengths == sizes:
            return [value for row in advantages for value in row]
    shape = getattr(advantages, "shape", None)
    if shape is not None and len(shape) == 2 and sizes == [shape[1]] * shape[0]:
        return advantages.reshape(-1)
    return advantages


def _all_or_none(name: str, fields: list[Any]) -> list[Any] | None:
    missing = [field is None for field in fields]
    if all(missing):
        return None
    if any(missing):
        raise InvalidRequestError(
            f"Batch.concat needs {name} in every batch or in none; batch {missing.index(True)} "
            "has none",
            field=name,
        )
    return fields


def _joined_extras(several: list[Mapping[str, Array]]) -> dict[str, Array]:
    joined = {}
    for name in several[0]:
        columns = [extras[name] for extras in several if name in extras]
        if len(columns) < len(several) or len({column.shape[1:] for column in columns}) > 1:
            raise InvalidRequestError(
                f"Batch.concat needs extras[{name!r}] in every batch, with entries of one shape",
                field="extras",
            )
        joined[name] = np.concatenate(columns)
    for index, extras in enumerate(several):
        for name in extras.keys() - joined.keys():
            raise InvalidRequestError(
                f"Batch.concat needs extras[{name!r}] in every batch; batch {index} has it and "
                "batch 0 has not",
                field="extras",
            )
    return joined


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return np.array_equal(left, right)
    return bool(left == right)
