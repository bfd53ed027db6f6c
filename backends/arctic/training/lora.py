"""Arctic backend: low-rank adapters by peft (imports peft, torch, transformers).

LoRA (arXiv:2106.09685): a linear layer computes W x + (alpha / rank) B A x, and only A and B are
trained. B begins as zero, so at the start the adapted model is the base.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from peft import LoraConfig as PeftConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel

from remote_rl.errors import InvalidRequestError

from ..config import LoraConfig

#: peft's name of the only adapter there is
_ADAPTER = "default"
#: what peft puts before a model's own names in the files of an adapter
_PREFIX = "base_model.model."


class Adapter:
    """The adapters of a model, put into it in place; its other parameters are frozen."""

    def __init__(self, model: PreTrainedModel, options: LoraConfig, seed: int) -> None:
        self.options = options
        self._model = model
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                inject_adapter_in_model(self.peft_config(), model, _ADAPTER)
            except ValueError as error:
                raise InvalidRequestError(
                    f"training.lora.targets {list(options.targets)} don't fit the model: {error}",
                    field="targets",
                ) from error
        for name, layer in self.layers().items():
            if not isinstance(layer.get_base_layer(), torch.nn.Linear):
                kind = type(layer.get_base_layer()).__name__
                raise InvalidRequestError(
                    f"training.lora.targets name {name.removesuffix('.weight')}, a {kind}; only "
                    "torch.nn.Linear is adapted, as only its adapters are merged and exported",
                    field="targets",
                )
        for name, each in model.named_parameters():
            each.requires_grad_("lora_" in name)

    def peft_config(self) -> PeftConfig:
        """What peft calls these options."""
        return PeftConfig(
            r=self.options.rank,
            lora_alpha=self.options.alpha,
            target_modules=list(self.options.targets),
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
        )

    def names(self) -> dict[int, str]:
        """Name of each parameter by id: the base's as in its files, the adapters' as in peft's."""
        return {id(each): _stored(name) for name, each in self._model.named_parameters()}

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Within, the model is its base."""
        layers = list(self.layers().values())
        try:
            for layer in layers:
                # peft's own switch also takes the gradient away from A and B
                layer._disable_adapters = True
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False

    def layers(self) -> dict[str, LoraLayer]:
        """The adapted layers by the name of the weight that they adapt."""
        return {
            f"{name}.weight": module
            for name, module in self._model.named_modules()
            if isinstance(module, LoraLayer)
        }


def parts(layer: LoraLayer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """W, A and B of a layer."""
    return (
        layer.get_base_layer().weight,
        layer.lora_A[_ADAPTER].weight,
        layer.lora_B[_ADAPTER].weight,
    )


def merged(layer: LoraLayer) -> torch.Tensor:
    """W + (alpha / rank) B A in W's dtype, a new tensor; its parameters must be whole."""
    weight, down, up = (each.detach() for each in parts(layer))
    product = up.to(torch.float32) @ down.to(torch.float32) * layer.scaling[_ADAPTER]
    return (weight.to(torch.float32) + product).to(weight.dtype)


def _stored(name: str) -> str:
    if "lora_" in name:
        return _PREFIX + name.replace(f".{_ADAPTER}.", ".")
    return name.replace(".base_layer.", ".")
