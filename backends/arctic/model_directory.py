"""Arctic backend: what a Hugging Face directory says of its model, read without torch (imports
config and the contract)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from remote_rl.errors import InvalidRequestError, UnsupportedError, describe
from remote_rl.protocol import ModelInfo, TokenizerFiles

from .config import ModelConfig

#: files that a tokenizer is made of, where they are there
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_INDEX, _WHOLE = "model.safetensors.index.json", "model.safetensors"
_LENGTH_BYTES = 8
_LARGEST_HEADER = 100 << 20


@attrs.frozen
class StoredTensor:
    """shape, and dtype as a tag of TENSOR_DTYPES or, where that has none, safetensors' own."""

    shape: tuple[int, ...]
    dtype: str


_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


def model_info(config: ModelConfig) -> ModelInfo:
    """Name, vocabulary, ends, context and size. Raises `InvalidRequestError` where the directory
    is no model's."""
    directory = Path(config.path)
    facts = _read_json(directory, "config.json")
    nested = facts.get("text_config")
    text = nested if isinstance(nested, Mapping) else facts
    vocabulary = text.get("vocab_size")
    if not isinstance(vocabulary, int):
        raise InvalidRequestError(
            f"{directory / 'config.json'} has no vocab_size; is it a language model's?",
            field="model",
        )
    longest = text.get("max_position_embeddings")
    if not isinstance(longest, int) and config.context_length is None:
        raise InvalidRequestError(
            f"{directory / 'config.json'} has no max_position_embeddings; set "
            "model.context_length to the longest prompt plus response",
            field="context_length",
        )
    limits = [each for each in (longest, config.context_length) if isinstance(each, int)]
    if isinstance(longest, int) and (config.context_length or 0) > longest:
        raise InvalidRequestError(
            f"model.context_length is {config.context_length}, and the model has positions for "
            f"{longest}",
            field="context_length",
        )
    tensors = stored_tensors(directory)
    return ModelInfo(
        name=config.name or config.path,
        vocab_size=vocabulary,
        eos_token_ids=end_ids(directory),
        context_length=min(limits),
        parameters=sum(math.prod(each.shape) for each in tensors.values()),
    )


def end_ids(directory: Path) -> tuple[int, ...]:
    """The ids that end a response: of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        if (directory / name).exists():
            ends = _read_json(directory, name).get("eos_token_id")
            if isinstance(ends, int):
                return (ends,)
            if isinstance(ends, list) and ends:
                return tuple(ends)
    return ()


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Name to shape and dtype of all tensors, from the headers of the safetensors files."""
    files = _weight_files(directory)
    if not files:
        raise InvalidRequestError(
            f"{directory} holds no .safetensors file; save the model with save_pretrained",
            field="model",
        )
    return {
        name: StoredTensor(tuple(entry["shape"]), _DTYPES.get(entry["dtype"], entry["dtype"]))
        for path in files
        for name, entry in _header(path)
    }


def _weight_files(directory: Path) -> list[Path]:
    """The files that transformers and vLLM read, since another copy of the weights under other
    names may lie beside them (consolidated.safetensors, an adapter)."""
    if (directory / _INDEX).exists():
        places = _read_json(directory, _INDEX).get("weight_map")
        if not isinstance(places, Mapping):
            raise InvalidRequestError(f"{directory / _INDEX} has no weight_map", field="model")
        return [directory / name for name in sorted(set(map(str, places.values())))]
    if (directory / _WHOLE).exists():
        return [directory / _WHOLE]
    return sorted(directory.glob("*.safetensors"))


def _header(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > min(_LARGEST_HEADER, path.stat().st_size):
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(length))
    except (OSError, ValueError) as error:
        raise InvalidRequestError(
            f"{path} can't be read as safetensors ({describe(error)})", field="model"
        ) from error
    return (item for item in header.items() if item[0] != "__metadata__")


def has_tokenizer(directory: Path) -> bool:
    """Whether a tokenizer's files are there."""
    return any((directory / name).exists() for name in ("tokenizer.json", "tokenizer.model")) or (
        (directory / "vocab.json").exists() and (directory / "merges.txt").exists()
    )


def tokenizer_files(directory: Path) -> TokenizerFiles:
    """The tokenizer's files with their contents."""
    if not has_tokenizer(directory):
        raise UnsupportedError(f"the model in {directory} has no tokenizer; work with ids")
    found = [name for name in _TOKENIZER_FILES if (directory / name).exists()]
    files = {name: np.fromfile(directory / name, np.uint8) for name in found}
    return TokenizerFiles(kind="huggingface", files=files)


def _read_json(directory: Path, name: str) -> Mapping[str, Any]:
    if not directory.is_dir():
        raise InvalidRequestError(
            f"the model {str(directory)!r} is no directory here; nothing is downloaded, so give "
            "the path of one with config.json, safetensors and tokenizer files",
            field="model",
        )
    try:
        facts = json.loads((directory / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequestError(
            f"{directory / name} can't be read ({describe(error)})", field="model"
        ) from error
    if not isinstance(facts, dict):
        raise InvalidRequestError(f"{directory / name} holds no JSON object", field="model")
    return facts
