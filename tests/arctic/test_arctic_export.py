"""An export is loaded by transformers and by vLLM, and both compute what the trainer does."""

from __future__ import annotations

import sampler_environment  # isort: skip  # noqa: F401 - before torch

from pathlib import Path

import numpy as np
import pytest
from arctic_models import write_model
from arctic_oracle import random_batch, random_cotangents
from arctic_ranks import Ranks
from arctic_training import STEADY, Plain, Trainer
from safetensors.torch import load_file
from sampler_engine import Running

from backends.arctic.config import LoraConfig
from backends.arctic.training.answers import RankSettings
from remote_rl import Batch

BATCH = random_batch(5)
PROMPTS = ((5, 6, 7, 8), tuple(range(3, 203)))
LORA = LoraConfig(rank=4, alpha=16.0, targets=("q_proj", "v_proj", "down_proj"))


@pytest.mark.parametrize(
    ("architecture", "stage", "lora"),
    [("llama", 3, None), ("qwen3", 2, LORA)],
    ids=["untied", "tied, merged adapters"],
)
def test_transformers_and_vllm_load_an_export_alike(
    tmp_path: Path, architecture: str, stage: int, lora: LoraConfig | None
) -> None:
    model, export = tmp_path / "model", tmp_path / "export"
    write_model(model, architecture, tied=lora is not None)
    ranks = Ranks(2, RankSettings(path=str(model), zero_stage=stage, head_chunk=5, lora=lora))
    try:
        trainer = Trainer(ranks)
        for _ in range(2):
            trainer.forward_backward(BATCH, random_cotangents(BATCH))
            trainer.step(STEADY)
        ranks.call("export", export)
        moved = _largest_difference(model, export)
        assert moved > 1e-3, "the steps changed too little to tell"
        engine = Running(architecture, tied=lora is not None, directory=export)
        try:
            samples = [each for prompt in PROMPTS for each in engine.draw(prompt, count=3)]
        finally:
            engine.end()
        batch = Batch(
            prompts=PROMPTS,
            prompt_index=[0] * 3 + [1] * 3,
            responses=[sample.tokens for sample in samples],
            temperature=1.0,
        )
        trained = trainer.forward(batch)["logprobs"]
    finally:
        ranks.close()
    by_vllm = np.concatenate([sample.logprobs for sample in samples])
    by_transformers = Plain(export).outputs(batch)["logprobs"]
    np.testing.assert_allclose(by_vllm, by_transformers, rtol=0, atol=1e-4)
    np.testing.assert_allclose(trained, by_transformers, rtol=0, atol=2e-5)


def _largest_difference(before: Path, after: Path) -> float:
    old, new = (load_file(path / "model.safetensors") for path in (before, after))
    assert old.keys() == new.keys()
    return max(float((new[name] - old[name]).abs().max()) for name in old)
