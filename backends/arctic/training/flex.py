"""Arctic backend: attention over a packed sequence on GPUs, by FlexAttention (imports torch and
packing).

Not verified on a GPU yet: this machine has none. What is tested, on CPUs and forward only (torch
has no backward there), is the mask and the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from .packing import Layout

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def mask_function(layout: Layout, window: int | None, device: torch.device) -> MaskFunction:
    """What FlexAttention calls a mask_mod: whether the query at one index of the sequence sees the
    key at another.

    It does where both are of one prompt's group, the key is of the prompt or of the query's own
    response, it does not come later in the sequence, and it is within the window. (Within a
    prompt and its response, the order in the sequence is that of the text.)
    """

    def moved() -> tuple[torch.Tensor, ...]:
        arrays = (*layout.owners(), layout.positions())
        return tuple(torch.from_numpy(array).to(device, torch.int32) for array in arrays)

    group, response, position = layout.cached(("owners", device), moved)

    def sees(
        _batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        visible = (group[query] == group[key]) & (key <= query)
        visible = visible & ((response[key] < 0) | (response[key] == response[query]))
        if window is not None:
            visible = visible & (position[query] - position[key] < window)
        return visible

    return sees


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
    device = query.device

    def build() -> BlockMask:
        sees = mask_function(layout, window, device)
        make = _compiled(create_block_mask, device.type)
        return make(sees, None, None, layout.length, layout.length, device=device)

    mask = layout.cached(("block mask", window, device), build)
    result: torch.Tensor = _compiled(flex_attention, device.type)(
        query, key, value, block_mask=mask, scale=scaling, enable_gqa=True
    )
    return result.transpose(1, 2).contiguous()


@functools.cache
def _compiled(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    # compiled, attention is one kernel that skips whole blocks, and no mask [T, T] is made on the
    # way to the block mask; not compiled both are dense, which does for tests
    if device_type == "cpu":
        return function
    compiled: Callable[..., Any] = torch.compile(function, dynamic=True)
    return compiled
