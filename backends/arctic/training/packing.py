"""Arctic backend: one sequence without padding out of a piece of a batch (imports torch, numpy,
remote_rl's types).

    prompt a | its responses, one after the other | prompt b | ...

Each prompt stands there once; every response goes on from its prompt's last position, so position
ids say what a token's position is in its own text. The last token of a response predicts nothing
and is left out. `layout` tells the attention what may see what; `predictors` says which position
of the sequence predicts which response token.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import attrs
import numpy as np
import numpy.typing as npt
import torch

from remote_rl.types import Batch

Span = tuple[int, int]
Built = TypeVar("Built")

#: the token of a piece without a response token: its outputs are never read
DUMMY_TOKEN = 0


@attrs.frozen
class PromptGroup:
    """Where a prompt and its responses lie in the packed sequence.

    prompt: (start, stop). responses: (start, stop) of each that holds a token; they follow the
    prompt and each other without a gap.
    """

    prompt: Span
    responses: tuple[Span, ...]


@attrs.frozen(eq=False)
class Layout:
    """Which parts the packed sequence has.

    length: T, positions of the sequence. groups: in order, without gaps.
    """

    length: int
    groups: tuple[PromptGroup, ...]
    _built: dict[Hashable, Any] = attrs.field(factory=dict, init=False, repr=False)

    def cached(self, key: Hashable, build: Callable[[], Built]) -> Built:
        """What `build` gives, made once for this layout: all layers of a model share it."""
        if key not in self._built:
            self._built[key] = build()
        built: Built = self._built[key]
        return built

    def positions(self) -> npt.NDArray[np.int64]:
        """[T], each token's position in its own text."""
        result = np.empty(self.length, np.int64)
        for group in self.groups:
            start, stop = group.prompt
            result[start:stop] = np.arange(stop - start)
            for first, last in group.responses:
                result[first:last] = np.arange(last - first) + (stop - start)
        return result

    def owners(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """([T] number of the prompt group, [T] number of the response or -1 in a prompt); no two
        responses have one number."""
        group_numbers = np.empty(self.length, np.int64)
        response_numbers = np.full(self.length, -1, np.int64)
        responses = 0
        for number, group in enumerate(self.groups):
            start = group.prompt[0]
            stop = group.responses[-1][1] if group.responses else group.prompt[1]
            group_numbers[start:stop] = number
            for first, last in group.responses:
                response_numbers[first:last] = responses
                responses += 1
        return group_numbers, response_numbers


@attrs.frozen(eq=False)
class Packed:
    """A piece as the model takes it. N is the number of its response tokens.

    tokens, position_ids: [1, T] int64. layout: what the attention needs.
    predictors: [N] int64, the position in [0, T) whose hidden state predicts each response token,
    row after row in the batch's order, whatever the order in the sequence. targets: [N] int64,
    those tokens. temperature: [N] float32, above 0.
    """

    tokens: torch.Tensor
    position_ids: torch.Tensor
    layout: Layout
    predictors: torch.Tensor
    targets: torch.Tensor
    temperature: torch.Tensor


def pack(batch: Batch | None, device: torch.device | str) -> Packed:
    """The packed sequence of all rows of `batch` (select a piece's rows first), on `device`.

    Empty responses, and prompts that no other response continues, contribute nothing. Where
    nothing is left, or `batch` is None, the sequence is one dummy token and N is 0. (A batch
    has no empty prompt: its constructor refuses them.)
    """
    members = {} if batch is None else _members(batch)
    if batch is None or not members:
        none = np.empty(0, np.int64)
        layout = Layout(1, (PromptGroup((0, 1), ()),))
        dummy = np.full(1, DUMMY_TOKEN, np.int64)
        return _on_device(dummy, layout, none, none, none.astype(np.float32), device)
    texts: list[npt.NDArray[Any]] = []
    groups: list[PromptGroup] = []
    predictors = np.empty(len(batch.responses.values), np.int64)
    end = 0
    for prompt_number, rows in members.items():
        prompt = batch.prompts[prompt_number]
        texts.append(prompt)
        start, end = end, end + len(prompt)
        last = end - 1
        spans: list[Span] = []
        for row in rows:
            response = batch.responses[row]
            texts.append(response[:-1])
            first, end = end, end + len(response) - 1
            into = int(batch.responses.offsets[row])
            predictors[into] = last
            predictors[into + 1 : into + len(response)] = np.arange(first, end)
            if end > first:
                spans.append((first, end))
        groups.append(PromptGroup((start, last + 1), tuple(spans)))
    temperature = np.where(batch.temperature == 0, np.float32(1), batch.temperature)
    return _on_device(
        np.concatenate(texts),
        Layout(end, tuple(groups)),
        predictors,
        batch.responses.values,
        np.repeat(temperature.astype(np.float32), batch.responses.lengths),
        device,
    )


def _members(batch: Batch) -> dict[int, list[int]]:
    """Prompt number to its rows that have a token; prompts in the order of their first row."""
    members: dict[int, list[int]] = {}
    filled = np.flatnonzero(batch.responses.lengths > 0)
    for row, prompt in zip(filled.tolist(), batch.prompt_index[filled].tolist(), strict=True):
        members.setdefault(prompt, []).append(row)
    return members


def _on_device(
    tokens: npt.NDArray[Any],
    layout: Layout,
    predictors: npt.NDArray[np.int64],
    targets: npt.NDArray[Any],
    temperature: npt.NDArray[np.float32],
    device: torch.device | str,
) -> Packed:
    def moved(array: npt.NDArray[Any], dtype: npt.DTypeLike = np.int64) -> torch.Tensor:
        # a copy: arrays that came over a transport are read-only, on which torch warns
        return torch.from_numpy(np.array(array, dtype)).to(device)

    return Packed(
        tokens=moved(tokens)[None],
        position_ids=moved(layout.positions())[None],
        layout=layout,
        predictors=moved(predictors),
        targets=moved(targets),
        temperature=moved(temperature, np.float32),
    )
