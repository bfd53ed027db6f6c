"""Inputs of a small SkyRL training, built from scratch, and the arguments that it is started with.

Imports tokenizers, transformers and pyarrow (SkyRL's environment) inside the functions that need
them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tiny_model
from tiny_model import END, PADDING

#: what an answer is written with, and words of prompts
ANSWER = "####"
NUMBERS = tuple("12345")
VOCABULARY = [PADDING, END, ANSWER, *NUMBERS, "say", "look", "seen"]

_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}say {% endif %}"
)


def build_model_folder(folder: Path) -> Path:
    """A word-level tokenizer with a chat template and the config of a tiny model; no weights."""
    return tiny_model.build_model_folder(folder, VOCABULARY, _TEMPLATE, context_length=128)


def build_data(path: Path, env_class: str, rows: int = 8) -> Path:
    """Prompts of one number each; gsm8k's rule wants it as the answer: `#### 3`."""
    with path.open("w", encoding="utf-8") as out:
        for index in range(rows):
            number = NUMBERS[index % 2]
            row: dict[str, Any] = {
                "prompt": [{"role": "user", "content": number}],
                "env_class": env_class,
                "reward_spec": {"method": "rule", "ground_truth": number},
                "index": index,
            }
            out.write(json.dumps(row) + "\n")
    return path


def build_inputs(folder: Path) -> dict[str, Path]:
    """Everything the command line names, under `folder`."""
    return {
        "model": build_model_folder(folder / "model"),
        "gsm8k": build_data(folder / "gsm8k.jsonl", "gsm8k"),
        "looking": build_data(folder / "looking.jsonl", "looking"),
    }


def overrides(
    inputs: dict[str, Path], target: str, folder: Path, *, data: str = "gsm8k"
) -> list[str]:
    """Arguments of SkyRL's entry point: synchronous GRPO with 4 prompts of 4 samples a step, two
    mini-batches. folder: of checkpoints, exports and metrics."""
    return [
        f"trainer.remote.target={target}",
        f"trainer.policy.model.path={inputs['model']}",
        f"trainer.ref.model.path={inputs['model']}",
        f"data.train_data=['{inputs[data]}']",
        f"data.val_data=['{inputs[data]}']",
        "data.dataloader.num_workers=0",
        "trainer.epochs=2",
        "trainer.train_batch_size=4",
        "trainer.policy_mini_batch_size=2",
        "trainer.eval_batch_size=8",
        "trainer.eval_before_train=false",
        "trainer.eval_interval=-1",
        "trainer.ckpt_interval=-1",
        "trainer.resume_mode=none",
        "trainer.policy.optimizer_config.lr=0.05",
        "trainer.policy.optimizer_config.weight_decay=0.0",
        "generator.n_samples_per_prompt=4",
        "generator.sampling_params.max_generate_length=6",
        "generator.eval_sampling_params.max_generate_length=6",
        "trainer.max_prompt_length=16",
        "trainer.logger=console",
        "trainer.print_example_interval=-1",
        f"trainer.ckpt_path={folder / 'ckpts'}",
        f"trainer.export_path={folder / 'exports'}",
        "environment.env_class=gsm8k",
    ]
