"""A model's folder for the trainings of the tests: tokenizer and config of a tiny Llama.

Imports tokenizers and transformers inside the function that needs them.
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
