"""A model's folder for the trainings of the tests: tokenizer and config of a tiny Llama,
and weights where an engine needs them.

Imports tokenizers, transformers and torch inside the functions that need them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

#: ids 0 and 1: padding, and the end of a response
PADDING, END = "<pad>", "<end>"


def build_model_folder(
    folder: Path, vocabulary: Sequence[str], template: str, *, context_length: int = 64
) -> Path:
    """A word-level tokenizer with this chat template and the config of a tiny model; no weights.

    vocabulary: begins with PADDING and END.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=PADDING))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PADDING, unk_token=PADDING
    )
    wrapped.chat_template = template
    wrapped.save_pretrained(folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(vocabulary),
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": context_length,
        "bos_token_id": None,
        "eos_token_id": words[END],
        "pad_token_id": words[PADDING],
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def give_weights(folder: Path, seed: int) -> Path:
    """Turns the model of `build_model_folder` into one of two layers with random float32 weights.
    Its heads are of 32: vLLM's attention on CPUs takes none smaller."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 2}
    config = AutoConfig.from_pretrained(folder, num_attention_heads=4, head_dim=32, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" not in name:
                    parameter.normal_(std=0.1)  # large enough for the prompt to matter
    model.save_pretrained(folder)
    return folder
