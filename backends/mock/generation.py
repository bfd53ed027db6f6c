"""Mock backend: one generate as a loop over positions (imports the policy and sampling
mathematics, and the contract)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from remote_rl.requests import Generate
from remote_rl.types import FinishReason, Generation, Label, Sample

from .model import Ids, Weights, log_probabilities, pieces, prompt_windows
from .sampling_math import StopStrings, draw, random_keys, truncated, uniform, without

Rows: TypeAlias = npt.NDArray[np.int64]
Column: TypeAlias = npt.NDArray[np.float32]

#: seconds of tokens between two looks at what the event loop wants
SLICE_SECONDS = 0.01


@attrs.frozen(eq=False)
class Served:
    """Weights as the sampler holds them. dtypes: by name, as they were delivered (a tag of
    TENSOR_DTYPES); the weights themselves are float64, read-only."""

    weights: Weights
    dtypes: dict[str, str]
    version: int
    label: Label


class Flight:
    """A generate in flight: rows are its samples, prompt 0 sample 0, prompt 0 sample 1, ...

    All rows are at the same position, so `steps[t]` tells which weights gave token t of each.
    """

    def __init__(self, request: Generate, seed: int, window: int, ends: tuple[int, ...]) -> None:
        params = request.params
        rows = len(request.prompts) * params.n
        self.params = params
        self.prompt_index = np.repeat(np.arange(len(request.prompts), dtype=np.int64), params.n)
        self.index = np.tile(np.arange(params.n, dtype=np.int64), len(request.prompts))
        self.samples: list[Sample | None] = [None] * rows
        self.finished = 0
        self.steps: list[Served] = []
        self._windows = np.repeat(prompt_windows(request.prompts, window), params.n, axis=0)
        self._keys = random_keys(seed, self.prompt_index, self.index)
        self._ends = np.array(sorted({*ends, *params.stop_token_ids}), np.int32)
        self._stops = StopStrings(params.stop, rows, params.min_tokens)
        self._active = np.arange(rows, dtype=np.int64)
        self._position = 0
        self._tokens = np.empty((rows, 0), np.int32)
        self._values = {name: np.empty((rows, 0), np.float32) for name in sorted(params.outputs)}

    @property
    def done(self) -> bool:
        """Whether every sample has ended."""
        return len(self._active) == 0

    def advance(self, serving: Callable[[], Served], wanted: Callable[[], bool]) -> list[Sample]:
        """Draws tokens until all is done, `wanted` says that someone waits, or a slice of time has
        passed, at least one; returns the samples that ended. Runs off the event loop."""
        ended: list[Sample] = []
        until = time.monotonic() + SLICE_SECONDS
        while not self.done:
            ended.extend(self._step(serving()))
            if wanted() or time.monotonic() >= until:
                break
        return ended

    def abort(self, served: Served) -> list[Sample]:
        """Ends what is left with the tokens it has; `served` stands for a token's weights where
        there is no token."""
        if not self.steps:
            self.steps.append(served)
        ended = [self._end(int(row), self._position, "abort") for row in self._active]
        self._active = self._active[:0]
        return ended

    def generation(self) -> Generation:
        """The answer, once all is done."""
        return Generation.from_samples([each for each in self.samples if each is not None])

    def _step(self, served: Served) -> list[Sample]:
        position, active = self._position, self._active
        tokens, values = self._next_tokens(served)
        self._reserve(position + 1)
        self.steps.append(served)
        self._position = position + 1
        self._tokens[active, position] = tokens
        for name, column in values.items():
            self._values[name][active, position] = column
        self._windows[active, 1:] = self._windows[active, :-1]
        self._windows[active, 0] = tokens
        return self._end_finished(tokens)

    def _next_tokens(self, served: Served) -> tuple[Ids, dict[str, Column]]:
        """Token of each active row, and the outputs asked for, [active] each."""
        active, params = self._active, self.params
        greedy = params.temperature == 0
        # as a Batch holds it, so that a forward at this temperature gives the same bits
        temperature = np.full(len(active), np.float32(1 if greedy else params.temperature), float)
        chances = uniform(self._keys[active], self._position)
        tokens = np.empty(len(active), np.int32)
        logprobs, drawn = np.empty(len(active), np.float32), np.zeros(len(active), np.float32)
        for piece in pieces(served.weights, len(active)):
            table = log_probabilities(
                served.weights, self._windows[active[piece]], temperature[piece]
            )
            rows = np.arange(len(table))
            early = self._position < params.min_tokens
            cut = without(table, self._ends) if early else table
            if greedy:
                tokens[piece] = cut.argmax(axis=1)
            else:
                cut = truncated(cut, top_p=params.top_p, top_k=params.top_k, min_p=params.min_p)
                tokens[piece] = draw(cut, chances[piece])
                drawn[piece] = cut[rows, tokens[piece]]
            logprobs[piece] = table[rows, tokens[piece]]
        values = {"logprobs": logprobs, "drawn_logprobs": drawn}
        return tokens, {name: values[name] for name in self._values}

    def _end_finished(self, tokens: Ids) -> list[Sample]:
        active, position = self._active, self._position
        at_end = np.isin(tokens, self._ends)
        stop_at = self._stops.add(active, tokens, position - 1)
        leaving = at_end | (stop_at >= 0)
        if position >= self.params.max_tokens:
            leaving[:] = True
        ended = []
        for place in np.flatnonzero(leaving):
            row = int(active[place])
            if at_end[place]:
                ended.append(self._end(row, position, "stop"))
            elif stop_at[place] >= 0:
                length = position if self.params.include_stop else int(stop_at[place])
                ended.append(self._end(row, length, "stop"))
            else:
                ended.append(self._end(row, position, "length"))
        self._active = active[~leaving]
        return ended

    def _end(self, row: int, length: int, reason: FinishReason) -> Sample:
        last = self.steps[max(length, 1) - 1]
        columns = {name: column[row, :length].copy() for name, column in self._values.items()}
        sample = Sample(
            tokens=self._tokens[row, :length].copy(),
            logprobs=columns.get("logprobs"),
            drawn_logprobs=columns.get("drawn_logprobs"),
            finish_reason=reason,
            first_version=self.steps[0].version,
            last_version=last.version,
            first_label=self.steps[0].label,
            label=last.label,
            prompt_index=int(self.prompt_index[row]),
            index=int(self.index[row]),
        )
        self.samples[row] = sample
        self.finished += 1
        return sample

    def _reserve(self, width: int) -> None:
        held = self._tokens.shape[1]
        if width <= held:
            return
        extra = ((0, 0), (0, min(max(held, 16), self.params.max_tokens - held)))
        self._tokens = np.pad(self._tokens, extra)
        self._values = {name: np.pad(column, extra) for name, column in self._values.items()}
