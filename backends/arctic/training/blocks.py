"""Arctic backend: attention over a packed sequence on CPUs, block by block (imports torch and
packing).

A block is a range of queries against keys that they see. Where a window hides nothing, a prompt is
one causal block, all responses of a prompt see it whole in a second, and each response sees itself
causally in a third. No mask, no copy of a prompt's keys, and nothing is computed that is not seen.
Queries that lie in two blocks get the merge of both results o_i by their log-sum-exps l_i,

    l = log(sum_i exp l_i),    o = sum_i exp(l_i - l) o_i

and the backward of each block, given the merged o and l, is the flash backward as it stands
(arXiv:2205.14135, appendix B). With a sliding window shorter than a text, the text is cut into
chunks of queries, each with the keys in reach and a mask by distance.

torch offers no public function that returns the log-sum-exp on CPUs; these are the two operators
that its `scaled_dot_product_attention` runs there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import torch

from .packing import Layout, PromptGroup, Span

#: queries of one block with a mask, so that masks stay small
WINDOW_CHUNK = 512


@attrs.frozen
class Block:
    """Queries in a span against keys in one or two spans.

    causal: query i sees keys 0 to i. window: None, or sees those at distances 0 to window - 1.
    merged: an earlier block has results for these queries.
    """

    queries: Span
    keys: tuple[Span, ...]
    causal: bool = False
    window: int | None = None
    merged: bool = False


def blocks_of(layout: Layout, window: int | None) -> tuple[Block, ...]:
    """The blocks that cover what each position may see, in an order in which they can be merged."""
    return tuple(block for group in layout.groups for block in _group_blocks(group, window))


def _group_blocks(group: PromptGroup, window: int | None) -> Iterator[Block]:
    start, stop = group.prompt
    length = stop - start
    longest = max((last - first for first, last in group.responses), default=0)
    if window is None or length + longest <= window:
        yield Block(group.prompt, (group.prompt,), causal=True)
        if group.responses:
            yield Block((group.responses[0][0], group.responses[-1][1]), (group.prompt,))
        for response in group.responses:
            yield Block(response, (response,), causal=True, merged=True)
        return
    yield from _windowed(group.prompt, start, window)
    for response in group.responses:
        yield from _windowed(response, response[0], window, group.prompt)


def _windowed(text: Span, start: int, window: int, prompt: Span | None = None) -> Iterator[Block]:
    """The chunks of a text that begins at `start`, after `prompt` where it has one."""
    for first in range(text[0], text[1], WINDOW_CHUNK):
        last = min(first + WINDOW_CHUNK, text[1])
        reach = first - window + 1  # the first key that the chunk's first query sees
        keys: list[Span] = []
        if prompt is not None and reach < start:
            keys.append((max(prompt[0], prompt[1] - (start - reach)), prompt[1]))
        keys.append((max(start, reach), last))
        yield Block((first, last), tuple(keys), window=window)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Layout,
    window: int | None,
    scaling: float,
) -> torch.Tensor:
    """Attention of query [1, Q heads, T, D] to key and value [1, KV heads, T, D] as `layout` says;
    [1, T, Q heads, D]. window: None, or how many positions a query sees, its own included."""
    blocks = layout.cached(("blocks", window), lambda: blocks_of(layout, window))
    positions = layout.cached("positions", lambda: torch.from_numpy(layout.positions()))
    result: torch.Tensor = _BlockAttention.apply(query, key, value, blocks, positions, scaling)
    return result


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        blocks: tuple[Block, ...],
        positions: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        folded = _folded(query, key, value)
        heads, shared, length, width = folded[0].shape
        wide = torch.promote_types(query.dtype, torch.float32)
        output = query.new_empty(length, heads, shared, width)
        merging = output if wide == query.dtype else torch.empty_like(output, dtype=wide)
        by_head = merging.permute(1, 2, 0, 3)
        normalisers = query.new_empty(heads, shared, length, dtype=wide)
        for block in blocks:
            rows = slice(*block.queries)
            part, part_normalisers = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *_operands(folded, block),
                0.0,
                block.causal,
                attn_mask=_mask(block, positions, query.dtype),
                scale=scaling,
            )
            if block.merged:
                old = normalisers[:, :, rows]
                both = torch.logaddexp(old, part_normalisers)
                part = part * (part_normalisers - both).exp()[..., None]
                part += by_head[:, :, rows] * (old - both).exp()[..., None]
                part_normalisers = both
            by_head[:, :, rows] = part
            normalisers[:, :, rows] = part_normalisers
        if merging is not output:
            output.copy_(merging)
        context.save_for_backward(query, key, value, output, normalisers, positions)
        context.blocks, context.scaling = blocks, scaling
        return output.view(1, length, heads * shared, width)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, by_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, normalisers, positions = context.saved_tensors
        folded = _folded(query, key, value)
        output = output.permute(1, 2, 0, 3)
        by_output = by_output[0].unflatten(1, output.shape[:2]).permute(1, 2, 0, 3)
        by_query, by_key, by_value = (
            torch.zeros_like(each, dtype=normalisers.dtype) for each in (query, key, value)
        )
        by_query_folded = by_query[0].unflatten(0, output.shape[:2])
        for block in context.blocks:
            rows = slice(*block.queries)
            operands = _operands(folded, block)
            backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
            parts = backward(
                by_output[:, :, rows],
                *operands,
                output[:, :, rows],
                normalisers[:, :, rows],
                0.0,
                block.causal,
                attn_mask=_mask(block, positions, query.dtype),
                scale=context.scaling,
            )
            by_query_folded[:, :, rows] += parts[0]
            for total, part in ((by_key[0], parts[1]), (by_value[0], parts[2])):
                _add_keys(total, part.sum(dim=1), block.keys)
        return (
            by_query.to(query.dtype),
            by_key.to(key.dtype),
            by_value.to(value.dtype),
            None,
            None,
            None,
        )


def _folded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views [KV heads, query heads of each, T, D]; nothing is copied."""
    heads = key.shape[1]
    shared = query.shape[1] // heads
    return (
        query[0].unflatten(0, (heads, shared)),
        key[0][:, None].expand(-1, shared, -1, -1),
        value[0][:, None].expand(-1, shared, -1, -1),
    )


def _operands(folded: tuple[torch.Tensor, ...], block: Block) -> tuple[torch.Tensor, ...]:
    query, *sides = folded
    spans = [slice(*span) for span in block.keys]
    if len(spans) == 1:
        held = [side[:, :, spans[0]] for side in sides]
    else:
        held = [torch.cat([side[:, :, span] for span in spans], dim=2) for side in sides]
    return (query[:, :, slice(*block.queries)], *held)


def _mask(block: Block, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """[1, 1, queries, keys], 0 where seen and minus infinity elsewhere."""
    if block.window is None:
        return None
    keys = torch.cat([positions[slice(*span)] for span in block.keys])
    distance = positions[slice(*block.queries), None] - keys
    hidden = (distance < 0) | (distance >= block.window)
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
    return mask[None, None]


def _add_keys(total: torch.Tensor, part: torch.Tensor, spans: tuple[Span, ...]) -> None:
    start = 0
    for first, last in spans:
        total[:, first:last] += part[:, start : start + last - first]
        start += last - first
