"""Mock backend: checkpoints and exports on disk (imports the optimizer, the model, config, and the
contract).

Tensors are in the safetensors format: eight bytes of the header's length (little-endian), a JSON
header padded with spaces to a multiple of eight, then the raw little-endian arrays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from remote_rl.byte_tokenizer import ByteTokenizer
from remote_rl.errors import ConflictError, InvalidRequestError, describe

from .config import MockConfig
from .model import Floats, Weights, frozen
from .optimizer import OptimizerState

MODEL_TYPE = "remote_rl_mock"
_FORMAT = 1
_HEADER_LENGTH_BYTES = 8


@attrs.frozen(kw_only=True, eq=False)
class Contents:
    """What a checkpoint holds; optimizer None where it was saved without."""

    weights: Weights
    reference: Weights
    reference_version: int
    optimizer: OptimizerState | None


def write_safetensors(
    path: Path, arrays: Mapping[str, Floats], metadata: Mapping[str, str] | None = None
) -> None:
    """A file of float64 tensors in the safetensors format."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, array in arrays.items():
        end = offset + array.nbytes
        header[name] = {"dtype": "F64", "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(_HEADER_LENGTH_BYTES, "little"))
        file.write(text)
        for array in arrays.values():
            file.write(np.ascontiguousarray(array, "<f8").tobytes())


def read_safetensors(path: Path) -> dict[str, Floats]:
    """The float64 tensors of a file that `write_safetensors` wrote."""
    data = path.read_bytes()
    start = _HEADER_LENGTH_BYTES + int.from_bytes(data[:_HEADER_LENGTH_BYTES], "little")
    if len(data) < _HEADER_LENGTH_BYTES or start > len(data):
        raise ValueError(f"{path.name} is cut short")
    header = json.loads(data[_HEADER_LENGTH_BYTES:start])
    arrays: dict[str, Floats] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = (start + offset for offset in entry["data_offsets"])
        if entry["dtype"] != "F64" or end > len(data):
            raise ValueError(f"tensor {name!r} of {path.name} is cut short or not float64")
        arrays[name] = np.frombuffer(data[begin:end], "<f8").reshape(entry["shape"]).copy()
    return arrays


def write_checkpoint(directory: Path, contents: Contents) -> None:
    """Files of a checkpoint, into an empty directory."""
    directory.mkdir(parents=True, exist_ok=True)
    write_safetensors(directory / "weights.safetensors", contents.weights)
    write_safetensors(directory / "reference.safetensors", contents.reference)
    facts: dict[str, Any] = {"format": _FORMAT, "reference_version": contents.reference_version}
    if contents.optimizer is not None:
        facts["optimizer_step"] = contents.optimizer.step
        moments = {f"first.{name}": each for name, each in contents.optimizer.first.items()}
        moments |= {f"second.{name}": each for name, each in contents.optimizer.second.items()}
        write_safetensors(directory / "optimizer.safetensors", moments)
    (directory / "trainer.json").write_text(json.dumps(facts), encoding="utf-8")


def read_checkpoint(directory: Path, like: Weights) -> Contents:
    """What a directory holds. Raises `InvalidRequestError` where its model has other tensors than
    `like`, and `ConflictError` where its files are damaged; nothing has changed then."""
    try:
        return _read(directory, like)
    except InvalidRequestError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConflictError(
            f"the checkpoint's files are damaged ({describe(error)}); load another one"
        ) from error


def _read(directory: Path, like: Weights) -> Contents:
    facts = json.loads((directory / "trainer.json").read_text(encoding="utf-8"))
    if facts["format"] != _FORMAT:
        raise InvalidRequestError(
            f"the checkpoint has format {facts['format']}; this version reads {_FORMAT}"
        )
    weights = _matching(read_safetensors(directory / "weights.safetensors"), like)
    reference = _matching(read_safetensors(directory / "reference.safetensors"), like)
    optimizer = None
    if "optimizer_step" in facts:
        moments = read_safetensors(directory / "optimizer.safetensors")
        halves = [
            _matching(
                {
                    name.removeprefix(prefix): each
                    for name, each in moments.items()
                    if name.startswith(prefix)
                },
                like,
            )
            for prefix in ("first.", "second.")
        ]
        optimizer = OptimizerState(facts["optimizer_step"], *halves)
    return Contents(
        weights=weights,
        reference=reference,
        reference_version=facts["reference_version"],
        optimizer=optimizer,
    )


def _matching(arrays: dict[str, Floats], like: Weights) -> dict[str, Floats]:
    for name, wanted in like.items():
        held = arrays.get(name)
        if held is None or held.shape != wanted.shape:
            shape = "is missing" if held is None else f"has shape {list(held.shape)}"
            raise InvalidRequestError(
                f"the checkpoint is of another model: its {name!r} {shape}, and this run's has "
                f"{list(wanted.shape)}; start the run with the options that it was saved under",
                field=name,
            )
    return frozen({name: arrays[name] for name in like})


def write_export(directory: Path, weights: Weights, config: MockConfig) -> None:
    """A Hugging Face directory: model.safetensors, config.json, and the tokenizer's facts."""
    directory.mkdir(parents=True, exist_ok=True)
    write_safetensors(directory / "model.safetensors", weights, {"format": "pt"})
    has_text = config.has_text
    _write_json(
        directory / "config.json",
        {
            "model_type": MODEL_TYPE,
            "architectures": ["RemoteRLMockForCausalLM"],
            "vocab_size": config.vocab_size,
            "window": config.window,
            "embedding_size": config.embedding_size,
            "hidden_size": config.hidden_size,
            "max_position_embeddings": config.context_length,
            "bos_token_id": ByteTokenizer.bos_token_id if has_text else None,
            "eos_token_id": list(config.ends),
            "pad_token_id": ByteTokenizer.pad_token_id if has_text else None,
            "tie_word_embeddings": False,
            "torch_dtype": "float64",
        },
    )
    _write_json(directory / "generation_config.json", {"eos_token_id": list(config.ends)})
    if has_text:
        _write_json(
            directory / "tokenizer_config.json",
            {
                "tokenizer_class": "ByteTokenizer",
                "module": "remote_rl.byte_tokenizer",
                "vocab_size": config.vocab_size,
                "bos_token": ByteTokenizer.bos_token,
                "eos_token": ByteTokenizer.eos_token,
                "pad_token": ByteTokenizer.pad_token,
            },
        )


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
