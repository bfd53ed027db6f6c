"""What a model's directory says, read without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from backends.arctic.config import ModelConfig
from backends.arctic.model_directory import (
    StoredTensor,
    end_ids,
    model_info,
    stored_tensors,
    tokenizer_files,
)
from remote_rl.errors import InvalidRequestError, UnsupportedError

FACTS = {"vocab_size": 30, "max_position_embeddings": 64, "eos_token_id": 2}


def directory(path: Path, facts: dict[str, Any] | None = None, **files: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(FACTS if facts is None else facts))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    tensors = {"model.a": np.zeros((3, 4), np.float32), "model.b": np.zeros(5, np.float16)}
    save_file(tensors, path / "model.safetensors")
    return path


def test_the_facts_of_a_model(tmp_path: Path) -> None:
    path = directory(tmp_path / "m")
    info = model_info(ModelConfig(path=str(path)))
    assert (info.name, info.vocab_size, info.eos_token_ids) == (str(path), 30, (2,))
    assert (info.context_length, info.parameters) == (64, 17)
    named = model_info(ModelConfig(path=str(path), name="mine", context_length=32))
    assert (named.name, named.context_length) == ("mine", 32)


PARTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.mark.parametrize("with_index", [True, False])
def test_tensors_come_from_the_headers_of_all_files(tmp_path: Path, with_index: bool) -> None:
    path = directory(tmp_path / "m")
    (path / "model.safetensors").rename(path / PARTS[0])
    save_file({"model.c": np.zeros(2, np.int64)}, path / PARTS[1])
    if with_index:
        write_index(path, {"model.a": PARTS[0], "model.b": PARTS[0], "model.c": PARTS[1]})
        other_copy(path)
    assert stored_tensors(path) == {
        "model.a": StoredTensor((3, 4), "float32"),
        "model.b": StoredTensor((5,), "float16"),
        "model.c": StoredTensor((2,), "int64"),
    }


def write_index(path: Path, places: Any) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def other_copy(path: Path) -> None:
    """Of the weights, under the names of the model's makers, as some publish it."""
    save_file({"layers.0.a": np.zeros((3, 4), np.float32)}, path / "consolidated.safetensors")


def test_another_copy_of_the_weights_is_left_alone(tmp_path: Path) -> None:
    path = directory(tmp_path / "m")
    other_copy(path)
    assert set(stored_tensors(path)) == {"model.a", "model.b"}


@pytest.mark.parametrize(
    ("places", "message"),
    [(None, "has no weight_map"), ({"model.a": "gone.safetensors"}, r"gone\.safetensors can't be")],
)
def test_an_index_that_leads_nowhere_is_named(tmp_path: Path, places: Any, message: str) -> None:
    path = directory(tmp_path / "m")
    write_index(path, places)
    with pytest.raises(InvalidRequestError, match=message):
        stored_tensors(path)


def test_a_model_of_no_longest_context_needs_one(tmp_path: Path) -> None:
    path = directory(tmp_path / "m", {"vocab_size": 30})
    with pytest.raises(InvalidRequestError, match=r"set model\.context_length"):
        model_info(ModelConfig(path=str(path)))
    assert model_info(ModelConfig(path=str(path), context_length=16)).context_length == 16


def test_ends_are_those_of_the_generation_config_where_it_has_some(tmp_path: Path) -> None:
    path = directory(tmp_path / "m", generation_config={"eos_token_id": [5, 7]})
    assert end_ids(path) == (5, 7)
    (path / "generation_config.json").write_text("{}")
    assert end_ids(path) == (2,)


def test_a_multimodal_configuration_is_read_where_its_text_is(tmp_path: Path) -> None:
    path = directory(tmp_path / "m", {"text_config": {**FACTS, "vocab_size": 50}})
    assert model_info(ModelConfig(path=str(path))).vocab_size == 50


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        (lambda path: (path / "config.json").unlink(), "config.json can't be read"),
        (lambda path: (path / "config.json").write_text("{"), "config.json can't be read"),
        (lambda path: (path / "config.json").write_text("[]"), "holds no JSON object"),
        (lambda path: (path / "config.json").write_text("{}"), "has no vocab_size"),
        (lambda path: (path / "model.safetensors").unlink(), "holds no .safetensors file"),
        (
            lambda path: (path / "model.safetensors").write_bytes(b"\xff" * 64),
            "can't be read as safetensors",
        ),
    ],
)
def test_what_is_no_model_is_refused_by_its_file(
    tmp_path: Path, breakage: Any, message: str
) -> None:
    path = directory(tmp_path / "m")
    breakage(path)
    with pytest.raises(InvalidRequestError, match=message):
        model_info(ModelConfig(path=str(path)))


def test_a_name_of_a_hub_is_no_directory() -> None:
    with pytest.raises(InvalidRequestError, match="nothing is downloaded"):
        model_info(ModelConfig(path="Qwen/Qwen3-0.6B"))


def test_a_context_longer_than_the_model_has_positions_is_refused(tmp_path: Path) -> None:
    path = directory(tmp_path / "m")
    with pytest.raises(InvalidRequestError, match="positions for 64"):
        model_info(ModelConfig(path=str(path), context_length=65))


def test_the_tokenizer_travels_as_it_lies_there(tmp_path: Path) -> None:
    path = directory(tmp_path / "m")
    with pytest.raises(UnsupportedError, match="no tokenizer"):
        tokenizer_files(path)
    (path / "tokenizer.json").write_text('{"a": 1}')
    (path / "chat_template.jinja").write_text("{{ messages }}")
    files = tokenizer_files(path).files
    assert {name: bytes(data) for name, data in files.items()} == {
        "tokenizer.json": b'{"a": 1}',
        "chat_template.jinja": b"{{ messages }}",
    }


LIGHT = (
    *("backend", "channel", "child", "config", "engine_factory", "host", "hosted"),
    *("leftovers", "model_directory", "plan"),
)


def test_the_backends_own_process_imports_nothing_heavy() -> None:
    lines = "; ".join(f"import backends.arctic.{name}" for name in LIGHT)
    heavy = ("torch", "ray", "vllm", "deepspeed", "transformers", "safetensors")
    code = f"{lines}; import sys; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
