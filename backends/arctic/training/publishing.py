"""Arctic backend: the current weights under their Hugging Face names, whole, one at a time: to the
sampler and into exports (imports torch, the engine, lora, tensor_files).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed

from ..model_directory import has_tokenizer, tokenizer_files
from ..weights.device_paths import finite
from ..weights.manifest import Form
from .joining import agree_on_files
from .loading import Loaded
from .lora import merged, parts
from .tensor_files import sync_directory, write_tensors
from .zero import Zero

#: where in an export with LoRA the adapter lies
_ADAPTER = "adapter"


def forms(loaded: Loaded) -> dict[str, Form]:
    """Shape and dtype tag of each tensor of `weights`, in their order. Tied weights come once,
    under the name that the model's files have them by."""
    return {
        loaded.names[id(each)]: (_shape(each), _tag(each.dtype))
        for each in loaded.model.parameters()
        if not _is_adapter(loaded, each)
    }


def weights(loaded: Loaded, engine: Zero) -> Iterator[tuple[str, torch.Tensor]]:
    """Each weight whole, adapters merged in; valid until the next is asked for. Every rank takes
    part, and must go to the end."""
    layers = {} if loaded.adapter is None else loaded.adapter.layers()
    adapted = {id(layer.get_base_layer().weight): layer for layer in layers.values()}
    for each in loaded.model.parameters():
        if _is_adapter(loaded, each):
            continue
        layer = adapted.get(id(each))
        needed = [each] if layer is None else list(parts(layer))
        with engine.gathered(needed):
            yield loaded.names[id(each)], each.detach() if layer is None else merged(layer)


def not_finite(loaded: Loaded) -> str | None:
    """The first parameter of which this rank's own part holds NaN or infinity, under its Hugging
    Face name; nothing is gathered for it."""
    for each in loaded.model.parameters():
        part = each.detach()
        if hasattr(each, "ds_tensor"):  # ZeRO 3; what lies behind the parameter's end is padding
            size = each.ds_tensor.ds_numel
            left = each.ds_numel - size * torch.distributed.get_rank()
            part = each.ds_tensor.detach().reshape(-1)[: max(0, min(size, left))]
        if not finite(part):
            return loaded.names[id(each)]
    return None


def _is_adapter(loaded: Loaded, parameter: torch.Tensor) -> bool:
    return loaded.adapter is not None and parameter.requires_grad


def _shape(parameter: torch.Tensor) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _tag(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def export(directory: Path, source: Path, loaded: Loaded, engine: Zero) -> None:
    """Writes `directory`, which transformers and vLLM load; the tokenizer's files come from
    `source`, the model's own directory. Raises `ConflictError` on all ranks where it can't."""
    failures: list[OSError | None] = []
    if torch.distributed.get_rank() == 0:
        try:
            _describe(directory, source, loaded)
        except OSError as error:
            failures.append(error)
    path = directory / "model.safetensors"
    failures.append(_write(path, forms(loaded), weights(loaded, engine)))
    adapters = [each for each in loaded.model.parameters() if _is_adapter(loaded, each)]
    if adapters:
        own = {loaded.names[id(each)]: (_shape(each), _tag(each.dtype)) for each in adapters}
        path = directory / _ADAPTER / "adapter_model.safetensors"
        failures.append(_write(path, own, _whole(adapters, loaded, engine)))
    agree_on_files("export", failures)


def _describe(directory: Path, source: Path, loaded: Loaded) -> None:
    """All files but the weights."""
    directory.mkdir(parents=True, exist_ok=True)
    loaded.model.config.save_pretrained(directory)
    if loaded.model.generation_config is not None:
        loaded.model.generation_config.save_pretrained(directory)
    if has_tokenizer(source):
        for name, content in tokenizer_files(source).files.items():
            content.tofile(directory / name)
    if loaded.adapter is not None:
        told = loaded.adapter.peft_config()
        told.inference_mode = True
        told.save_pretrained(str(directory / _ADAPTER))


def _whole(
    parameters: list[torch.nn.Parameter], loaded: Loaded, engine: Zero
) -> Iterator[tuple[str, torch.Tensor]]:
    for each in parameters:
        with engine.gathered([each]):
            yield loaded.names[id(each)], each.detach()


def _write(
    path: Path, described: dict[str, Form], tensors: Iterator[tuple[str, torch.Tensor]]
) -> OSError | None:
    if torch.distributed.get_rank() != 0:
        for _ in tensors:  # to take part
            pass
        return None
    error = write_tensors(path, described, tensors, {"format": "pt"})
    if error is None:
        sync_directory(path.parent)
    return error
