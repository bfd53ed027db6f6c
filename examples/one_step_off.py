"""Sampling one step ahead: the next batch is drawn while this one is trained on.

Every sample carries the version of the weights that drew it, so its staleness is known exactly, and
PPO's ratio is taken against the logprobs it was drawn with.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from remote_rl import AdamW, Batch, GenerateOperation, SamplingParams, connect, losses


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="mock", help="backend's name or server's address")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--group-size", type=int, default=16)
    return parser.parse_args()


def main(options: argparse.Namespace) -> None:
    data = Path(__file__).parent / "data" / "arithmetic.jsonl"
    problems = [json.loads(line) for line in data.read_text().splitlines()]
    params = SamplingParams(n=options.group_size, max_tokens=1)
    loss = losses.PPO(entropy=losses.Entropy(0.2))
    with connect(options.target, start="base") as rl:
        tokenizer = rl.tokenizer().result()
        prompts = [tokenizer.encode(problem["prompt"]) for problem in problems]

        def advantages(groups: Any) -> Any:
            texts = [[tokenizer.decode(sample.tokens) for sample in group] for group in groups]
            answers = [problem["answer"] for problem in problems]
            right = np.array([[t == a for t in row] for row, a in zip(texts, answers, strict=True)])
            digit = np.array([[text.isdigit() for text in row] for row in texts])
            scores = np.where(right, 1.0, 0.1 * digit)
            spread = scores.std(axis=1, keepdims=True) + 1e-6
            return (scores - scores.mean(axis=1, keepdims=True)) / spread, float(right.mean())

        ahead: GenerateOperation = rl.sampling.generate(prompts, params)
        for step in range(options.steps):
            groups = ahead.result()
            if step + 1 < options.steps:
                ahead = rl.sampling.generate(prompts, params)  # runs beside what follows
            scaled, reward = advantages(groups)
            batch = Batch.from_groups(groups, advantages=scaled)
            backward = rl.training.forward_backward(batch, loss)
            rl.training.optim_step(AdamW(lr=0.01))
            rl.weights.sync(in_flight="wait").result()  # the samples ahead finish unchanged
            trained = backward.result()
            staleness = batch.staleness(trained.version)
            if step % 10 == 0 or step == options.steps - 1:
                print(
                    f"step {step}  reward {reward:.3f}  trained at version {trained.version}"
                    f"  staleness {staleness.min()} to {staleness.max()}"
                    f"  clipped {trained.metrics['clip_fraction']:.3f}"
                )


if __name__ == "__main__":
    main(arguments())
