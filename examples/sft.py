"""Supervised fine-tuning: cross-entropy on prompts and answers, then what greedy decoding says."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from remote_rl import AdamW, Batch, SamplingParams, connect, losses


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    data = Path(__file__).parent / "data" / "arithmetic.jsonl"
    parser.add_argument("--target", default="mock", help="backend's name or server's address")
    parser.add_argument("--data", type=Path, default=data)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--mini-batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.01)
    return parser.parse_args()


def main(options: argparse.Namespace) -> None:
    problems = [json.loads(line) for line in options.data.read_text().splitlines()]
    shuffle = np.random.default_rng(0)
    with connect(options.target, start="base") as rl:
        tokenizer = rl.tokenizer().result()
        prompts = [tokenizer.encode(problem["prompt"]) for problem in problems]
        end = tokenizer.eos_token_id
        data = Batch(
            prompts=prompts,
            prompt_index=np.arange(len(problems)),
            responses=[[*tokenizer.encode(problem["answer"]), end] for problem in problems],
            temperature=1.0,
        )
        for epoch in range(options.epochs):
            values = []
            for piece in data.select(shuffle.permutation(len(data))).split(options.mini_batch):
                values.append(rl.training.forward_backward(piece, losses.CrossEntropy()))
                rl.training.optim_step(AdamW(lr=options.lr))
            # a whole epoch is in flight by now; it is waited for here
            mean = np.mean([value.result().value for value in values])
            if epoch % 10 == 0 or epoch == options.epochs - 1:
                print(f"epoch {epoch}  cross-entropy {mean:.4f}")
        rl.weights.sync().result()
        greedy = SamplingParams(max_tokens=4, temperature=0.0)
        groups = rl.sampling.generate(prompts, greedy).result()
        said = [tokenizer.decode(group[0].tokens, skip_special_tokens=True) for group in groups]
        right = sum(text == problem["answer"] for text, problem in zip(said, problems, strict=True))
        print(f"{right} of {len(problems)} answers are right")


if __name__ == "__main__":
    main(arguments())
