"""How much memory torch's CPU operators hold at once, counted allocation by allocation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(function: Callable[[], Any]) -> int:
    """The most bytes that tensors made inside `function()` held at any moment, those inside
    operators included; what existed before is not counted."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
        del result
    held = peak = 0
    events = profiler.profiler.kineto_results.events()
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    )
    assert changes, "the profiler saw no allocation"
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


def largest_tensor(function: Callable[[], Any]) -> int:
    """Numbers in the largest tensor that an operator inside `function()` returned, forward or
    backward; views count as what they show."""
    seen = _Largest()
    with seen:
        function()
    return seen.numbers


class _Largest(torch.utils._python_dispatch.TorchDispatchMode):
    numbers = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        result = operator(*arguments, **(keywords or {}))
        for each in torch.utils._pytree.tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self.numbers = max(self.numbers, each.numel())
        return result
