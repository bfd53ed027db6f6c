"""Arctic backend: the attention of a packed sequence, registered with transformers (imports torch,
transformers, blocks, flex, packing, remote_rl's errors).

A model whose `_attn_implementation` is `NAME` calls `attention` in every layer, with whatever its
forward was given: `packed_layout=Layout` among it. Nothing is held between calls, so models and
layouts never mix.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from remote_rl.errors import BackendError, UnsupportedError

from . import blocks, flex
from .packing import Layout

#: the name to load or set a model with
NAME = "remote_rl_packed"
#: what layers may pass on and means nothing here: positions are in the layout, nothing is cached,
#: and no attention weights are returned
_WITHOUT_MEANING = frozenset(
    {"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states"}
)


def register() -> None:
    """Makes `NAME` known to transformers; doing it again changes nothing."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def _no_mask(*arguments: Any, **keywords: Any) -> None:
    """The mask transformers asks for: the layout says it all."""


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_layout: Layout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query [1, Q heads, T, D], key and value
    [1, KV heads, T, D] to ([1, T, Q heads, D], None).

    Raises `UnsupportedError` for what it would have to ignore: dropout, a mask, a bias, sinks, soft
    capping, anything it doesn't know; `BackendError` where it is called without a layout.
    """
    if packed_layout is None:
        raise BackendError(
            f"{_name(module)} ran {NAME!r} attention without a packed layout; call the model "
            "through PolicyModule, or set another attention implementation for anything else"
        )
    _refuse(module, attention_mask, dropout, is_causal, others)
    window = _window(module, sliding_window)
    if key.shape[:3] != (1, key.shape[1], packed_layout.length):
        raise UnsupportedError(
            f"{_name(module)} attends to keys of shape {tuple(key.shape)}, not to the "
            f"{packed_layout.length} positions of its input; such an attention can't be packed"
        )
    if key.shape[3] != value.shape[3]:
        raise UnsupportedError(
            f"{_name(module)} has keys of {key.shape[3]} and values of {value.shape[3]} numbers; "
            "the packed attention needs one size"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    run = blocks.attend if query.device.type == "cpu" else flex.attend
    return run(query, key, value, packed_layout, window, scale), None


def _refuse(
    module: torch.nn.Module,
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool | None,
    others: dict[str, Any],
) -> None:
    problems = sorted(
        name
        for name, given in others.items()
        if given is not None and given is not False and name not in _WITHOUT_MEANING
    )
    if mask is not None:
        problems.append("attention_mask")
    if dropout:
        problems.append(f"dropout={dropout}")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal:
        problems.append("is_causal=False")
    if problems:
        raise UnsupportedError(
            f"{_name(module)} asks its attention for {', '.join(problems)}, which the packed "
            "attention can't honour; use a model without it"
        )


def _window(module: torch.nn.Module, given: int | None) -> int | None:
    """The layer's sliding window; refused where the layer says that it slides and passes none."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    slides = (
        kinds[layer] == "sliding_attention"
        if kinds and layer is not None
        else getattr(config, "sliding_window", None) is not None
    )
    if slides and given is None:
        raise UnsupportedError(
            f"layer {layer} of {type(config).__name__} has a sliding window that {_name(module)} "
            "does not pass to its attention function; such a model can't be packed"
        )
    return None if given is None else int(given)


def _name(module: torch.nn.Module) -> str:
    return type(module).__name__


register()
