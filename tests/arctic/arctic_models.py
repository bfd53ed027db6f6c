"""Tiny causal language models in Hugging Face's directories, made by the tests that use them.

`write_model(directory, "qwen3")` writes config.json and model.safetensors; weights are random by
a seed, and large enough that attention, norms and biases matter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 300
ARCHITECTURES = ("qwen3", "llama", "qwen2")

_CLASSES: dict[str, tuple[type[Any], type[Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,  # heads of 32: vLLM's attention on CPUs takes none smaller
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def tiny_model(architecture: str, *, tied: bool = False, seed: int = 0, **settings: Any) -> Any:
    """A float32 model of "qwen3", "llama", "qwen2" or "mistral"; settings go into its config."""
    config_class, model_class = _CLASSES[architecture]
    own = {} if architecture == "qwen2" else {"head_dim": 32}  # qwen2 has no such setting
    config = config_class(**{**_SIZES, **own, "tie_word_embeddings": tied, **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(std=0.1)
    return model


def write_model(
    directory: Path | str, architecture: str, *, tied: bool = False, seed: int = 0, **settings: Any
) -> Path:
    """Saves `tiny_model(...)` to `directory` and returns it."""
    path = Path(directory)
    tiny_model(architecture, tied=tied, seed=seed, **settings).save_pretrained(path)
    return path
