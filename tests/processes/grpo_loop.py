"""The loop under test: GRPO with a reference, saved every few steps; all that it sees as bits."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from remote_rl import AdamW, Batch, SamplingParams, Session, losses

PROMPTS = [[1, 2], [3]]
PARAMS = SamplingParams(n=3, max_tokens=6, temperature=0.8)  # no seed: the run derives one
SAVE_EVERY = 2


def step(rl: Session, number: int) -> str:
    """One turn, on policy; a digest of everything that it saw."""
    groups = rl.sampling.generate(PROMPTS, PARAMS).result()
    rewards = [float(sample.tokens.sum() % 5) - 2 for group in groups for sample in group]
    batch = Batch.from_groups(groups, advantages=rewards)
    reference = rl.training.forward(batch, policy="reference").result()
    batch = batch.replace(ref_logprobs=reference.logprobs)
    backward = rl.training.forward_backward(batch, losses.PPO(kl=losses.KL(0.1)))
    update = rl.training.optim_step(AdamW(lr=0.05, weight_decay=0.1)).result()
    rl.weights.sync(label=number).result()
    seen = hashlib.sha256()
    for array in (
        *(sample.tokens for group in groups for sample in group),
        *(sample.logprobs for group in groups for sample in group),
        reference.logprobs.values,
    ):
        seen.update(array.tobytes())
    seen.update(repr((backward.result().value, update.grad_norm)).encode())
    return seen.hexdigest()


def train(rl: Session, first: int, end: int, seen: dict[int, str]) -> None:
    """Steps `first` to `end` - 1, what each saw into `seen`; saves as "step-N", N the next one."""
    if first == 0:
        rl.training.snapshot("start").result()
        rl.training.set_reference("start").result()
    for number in range(first, end):
        seen[number] = step(rl, number)
        if (number + 1) % SAVE_EVERY == 0:
            rl.training.save(f"step-{number + 1}", {"next": number + 1}).result()


def contents(checkpoints: Path, name: str) -> dict[str, Any]:
    """A checkpoint's own files: weights, reference, optimizer with its step counter, as bytes."""
    folder = checkpoints / "checkpoints" / name / "state"
    return {path.name: path.read_bytes() for path in folder.iterdir()}
