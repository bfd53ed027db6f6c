"""Arctic backend: a loaded model as the count of floating-point operations sees it (imports torch,
transformers and the contract's count)."""

from __future__ import annotations

from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from remote_rl.errors import UnsupportedError
from remote_rl.types.flops import DecoderShape

#: settings that say how many experts a layer has
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def shape_of(model: Any) -> DecoderShape:
    """What `DecoderShape` needs, of a transformers causal language model, adapters included.

    Raises `UnsupportedError` with the reason for a model that the formula doesn't fit.
    """
    config = model.config
    _refuse_experts(config)
    trained = frozen = 0
    for name, module in model.base_model.named_modules():
        size = _matrix(name, module)
        if size and module.weight.requires_grad:
            trained += size
        else:
            frozen += size
    head = model.get_output_embeddings()
    return DecoderShape(
        trained=trained,
        frozen=frozen,
        head=head.in_features * head.out_features,
        head_trained=head.weight.requires_grad,
        attention_width=_attention_width(config),
        windows=_windows(config),
    )


def _refuse_experts(config: Any) -> None:
    for name in _EXPERTS:
        if isinstance(getattr(config, name, None), int) and getattr(config, name) > 1:
            raise UnsupportedError(
                f"FLOPs are not counted for a mixture of experts ({name}={getattr(config, name)})"
            )


def _matrix(name: str, module: torch.nn.Module) -> int:
    """Numbers of the matrix that a module multiplies each position with; 0 where it has none.

    By the module's own sizes: at ZeRO 3 the parameter is not there."""
    if isinstance(module, torch.nn.Linear):
        return int(module.in_features * module.out_features)
    if isinstance(module, Conv1D):
        return int(module.nx * module.nf)
    if isinstance(module, torch.nn.Embedding):
        return 0  # looked up
    for own, parameter in module.named_parameters(recurse=False):
        if len(getattr(parameter, "ds_shape", parameter.shape)) > 1:
            raise UnsupportedError(
                f"FLOPs are not counted for a model with {name}.{own}, a tensor of "
                f"{type(module).__name__}"
            )
    return 0


def _attention_width(config: Any) -> int:
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        raise UnsupportedError(
            f"FLOPs are not counted for {type(config).__name__}, which has no num_attention_heads"
        )
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(heads * size)


def _windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or [
        "full_attention" if window is None else "sliding_attention"
    ] * int(config.num_hidden_layers)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
