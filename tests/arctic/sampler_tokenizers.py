"""Small tokenizers in Hugging Face's directories, made by the tests that use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_TEXT = [
    "the sum of one and two is three, and the answer is 3.",
    "Grüße, Čau, 你好, 🙂🙃 and the end.",
    "stop here, stop there; the END of it all",
]
_SPECIAL = ["<pad>", "<bos>", "<eos>"]


def byte_level(size: int = 300) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as Qwen's and Llama 3's: ids 0 to 2 are special, <think> is an added token
    that is text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        _TEXT,
        trainers.BpeTrainer(
            vocab_size=size - 1,
            special_tokens=_SPECIAL,
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return _wrapped(tokenizer)


def byte_fallback() -> PreTrainedTokenizerFast:
    """SentencePiece's way, as Llama 2's: a space is part of a piece, unknown bytes are tokens."""
    pieces = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "▁", "end", "▁sum"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: number for number, piece in enumerate(pieces)},
            merges=[],
            byte_fallback=True,
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in _SPECIAL])
    return _wrapped(tokenizer)


def word_piece() -> PreTrainedTokenizerFast:
    """BERT's way: spaces are nowhere, so tokens are no bytes."""
    pieces = [*_SPECIAL, "[UNK]", "the", "end", "##ing", "sum"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return _wrapped(tokenizer)


def save(tokenizer: PreTrainedTokenizerFast, directory: Path) -> Path:
    """Beside a model's files."""
    tokenizer.save_pretrained(directory)
    return directory


def _wrapped(tokenizer: Any) -> PreTrainedTokenizerFast:
    names = dict(zip(("pad_token", "bos_token", "eos_token"), _SPECIAL))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
