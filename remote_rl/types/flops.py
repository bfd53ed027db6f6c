"""Contract: how many tokens and floating-point operations a decoder needs for a batch (imports
numpy, attrs, batch and fields).

A multiplication and an addition are two operations. Of a transformer's decoder only products of
matrices count; norms, activations, rotations and the softmax are left out, as in the counts of
PaLM (arXiv:2204.02311, appendix B) and Megatron-LM (arXiv:2104.04473, appendix). Over T positions
that go through the layers, of which R predict a response token, and S pairs of a position and one
that it sees:

    forward  = 2 N T + 2 H R + 4 sum over layers of W S
    backward = twice the forward, less the gradient by weights that are not trained

N are the numbers in the layers' matrices that a position is multiplied with (without the embedding,
which is looked up, and the output layer), H those of the output layer, W the query heads of a
layer times the size of a head: each pair costs 2 W for the score and 2 W for the value. The
backward has one product for the gradient by its input and one for the gradient by its weight where
the forward has one.

Three things are closer to what a batch needs than PaLM's 6 N + 12 L H Q T a token: a position is
paired with those that it sees, about half of all (PaLM and verl count all); a prompt is counted
once for all its responses; and the output layer is counted where a token is predicted.

For a mixture of experts N holds the matrices of the experts that one token is routed to.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from .batch import Batch
from .fields import as_tuple, each, flag, integer, optional, plain, strict


def _size(minimum: int = 0, **default: Any) -> Any:
    return attrs.field(**default, converter=plain, validator=integer(minimum=minimum))


@strict
@attrs.frozen(kw_only=True)
class DecoderShape:
    """What the count needs of a decoder-only transformer.

    trained, frozen: numbers in the layers' matrices that each position is multiplied with, those
    that get a gradient and those that don't (with low-rank adapters, the base's). head: numbers in
    the output layer's matrix. head_trained: whether that gets a gradient. attention_width: query
    heads of a layer times the size of a head. windows: one for each layer, how many positions one
    sees, its own included; None is all before it.
    """

    trained: int = _size()
    frozen: int = _size(default=0)
    head: int = _size()
    head_trained: bool = attrs.field(default=True, validator=flag())
    attention_width: int = _size(minimum=1)
    windows: tuple[int | None, ...] = attrs.field(
        converter=as_tuple, validator=each(optional(integer(minimum=1)))
    )

    def forward(self, batch: Batch) -> float:
        """Operations of a forward over a batch."""
        predicted = len(batch.responses.values)
        layers = self.trained + self.frozen
        linear = 2.0 * (layers * packed_tokens(batch) + self.head * predicted)
        return linear + self._attention(batch)

    def backward(self, batch: Batch) -> float:
        """Operations of the backward that follows."""
        predicted = len(batch.responses.values)
        layers = 2 * self.trained + self.frozen
        head = (2 if self.head_trained else 1) * self.head
        linear = 2.0 * (layers * packed_tokens(batch) + head * predicted)
        return linear + 2 * self._attention(batch)

    def _attention(self, batch: Batch) -> float:
        pairs = {window: seen_pairs(batch, window) for window in set(self.windows)}
        return 4.0 * self.attention_width * sum(pairs[window] for window in self.windows)


def packed_tokens(batch: Batch, rows: Any = None) -> int:
    """Positions that a model computes for `rows` of the batch (indices; None is all) in one piece.

    Each prompt that a non-empty response continues counts once, each response its length less
    one, since its last token predicts nothing. 0 where every response is empty.
    """
    prompts, _, inputs = _lengths(batch, rows)
    return int(prompts.sum() + inputs.sum())


def seen_pairs(batch: Batch, window: int | None = None) -> int:
    """Pairs of one of the `packed_tokens` of a batch and one that it sees, itself included: those
    before it in its own text, at most `window` of them."""
    prompts, before, inputs = _lengths(batch, None)
    texts = _triangles(before + inputs, window) - _triangles(before, window)
    return int(_triangles(prompts, window).sum() + texts.sum())


def _lengths(batch: Batch, rows: Any) -> tuple[Any, Any, Any]:
    """Lengths of the prompts that are computed, each once; and for each non-empty response the
    length of its prompt and its own, less one."""
    index = np.asarray(batch.prompt_index, np.int64)
    lengths = np.asarray(batch.responses.lengths, np.int64)
    if rows is not None:
        index, lengths = index[rows], lengths[rows]
    filled = lengths > 0
    held = np.asarray(batch.prompts.lengths, np.int64)
    return held[np.unique(index[filled])], held[index[filled]], lengths[filled] - 1


def _triangles(lengths: Any, window: int | None) -> Any:
    """Of texts of these lengths, how many positions their positions see together."""
    most = lengths if window is None else np.minimum(lengths, window)
    return most * (most + 1) // 2 + (lengths - most) * most
