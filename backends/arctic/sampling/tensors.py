"""Arctic backend: the tensors that a model's weights are made of, from its directory (imports
model_directory and weights.manifest; no torch)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..model_directory import stored_tensors
from ..weights.manifest import FLOATING, Form

_HEAD = "lm_head.weight"


def expected_forms(directory: Path, dtype: str) -> dict[str, Form]:
    """Shape and dtype by Hugging Face name, as an update brings them: floating tensors in the
    served dtype, and no head where the embedding is the head."""
    tied = _facts(directory).get("tie_word_embeddings", False)
    return {
        name: (tensor.shape, dtype if tensor.dtype in FLOATING else tensor.dtype)
        for name, tensor in stored_tensors(directory).items()
        if not (tied and name == _HEAD)
    }


def vocabulary(directory: Path) -> int:
    """Ids lie below it."""
    return int(_facts(directory)["vocab_size"])


def _facts(directory: Path) -> Mapping[str, Any]:
    facts: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return {**facts, **facts.get("text_config", {})}
