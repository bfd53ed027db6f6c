"""Arctic backend: one sample on its way (imports the contract, settings, stops)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import numpy as np

from remote_rl.errors import RemoteRLError
from remote_rl.types import FinishReason, Label, Sample

from .settings import SampleRequest
from .stops import StopStrings, TokenBytes

#: weights that an engine has served: version and label
Served: TypeAlias = tuple[int, Label]

#: columns of what the sampler says of each token (drawing.py)
LOGPROB, DRAWN, SERIAL = range(3)


@attrs.frozen
class Drawn:
    """What a step gave a flight: its number, tokens, and what the sampler says of each. over: why
    the core gives it no more, None where it goes on."""

    number: str
    tokens: Sequence[int]
    rows: Sequence[Sequence[float]]
    over: str | None = None


@attrs.define(eq=False)
class Flight:
    """A request in the engine. sink: gets the sample, or the error, once it has ended; called on
    the engine's thread."""

    number: str
    request: SampleRequest
    ends: frozenset[int]
    sink: Callable[[Sample | RemoteRLError], None]
    stops: StopStrings | None = None
    tokens: list[int] = attrs.field(factory=list)
    rows: list[Sequence[float]] = attrs.field(factory=list)

    @classmethod
    def board(
        cls,
        number: str,
        request: SampleRequest,
        ends: frozenset[int],
        table: TokenBytes | None,
        sink: Callable[[Sample | RemoteRLError], None],
    ) -> Flight:
        """With its own ends and stop strings."""
        params, stops = request.params, None
        if table is not None and params.stop:
            stops = StopStrings(params.stop, table, params.min_tokens)
        return cls(
            number=number,
            request=request,
            ends=ends | frozenset(params.stop_token_ids),
            sink=sink,
            stops=stops,
        )

    def take(self, drawn: Drawn) -> tuple[int, FinishReason] | None:
        """Takes in what a step gave; length and reason where the sample has ended by it."""
        for token, row in zip(drawn.tokens, drawn.rows, strict=True):
            end = self._add(token, row)
            if end is not None:
                return end
        return None

    def _add(self, token: int, row: Sequence[float]) -> tuple[int, FinishReason] | None:
        params = self.request.params
        self.tokens.append(token)
        self.rows.append(row)
        position = len(self.tokens)
        stop = None if self.stops is None else self.stops.add(token, position - 1)
        if token in self.ends:
            return position, "stop"
        if stop is not None:
            return position if params.include_stop else stop, "stop"
        if position >= params.max_tokens:
            return position, "length"
        return None

    def sample(
        self, length: int, reason: FinishReason, served: Mapping[int, Served], now: Served
    ) -> Sample:
        """The first `length` tokens as a sample. served: by the serial number that came with each
        token; now: what stands for a token's weights where there is no token."""
        rows: Any = np.array(self.rows, np.float32).reshape(len(self.rows), SERIAL + 1)
        serials = rows[:, SERIAL].astype(np.int64)
        first = served[int(serials[0])] if len(serials) else now
        last = served[int(serials[max(length, 1) - 1])] if len(serials) else now
        outputs = self.request.params.outputs
        return Sample(
            tokens=np.array(self.tokens[:length], np.int32),
            logprobs=rows[:length, LOGPROB].copy() if "logprobs" in outputs else None,
            drawn_logprobs=rows[:length, DRAWN].copy() if "drawn_logprobs" in outputs else None,
            finish_reason=reason,
            first_version=first[0],
            last_version=last[0],
            first_label=first[1],
            label=last[1],
            prompt_index=self.request.prompt_index,
            index=self.request.index,
        )


def undrawn(request: SampleRequest, now: Served) -> Sample:
    """The sample of a request that was aborted before its first token. now: what is served."""
    flight = Flight("", request, frozenset(), lambda result: None)
    return flight.sample(0, "abort", {}, now)
