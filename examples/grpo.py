"""GRPO on a file of prompts with a verifiable reward, against any backend.

Runs the mock inside this process; from `--target http://127.0.0.1:7700` it prints the same.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from reporting import Report

from remote_rl import AdamW, Batch, Group, SamplingParams, connect, losses


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    data = Path(__file__).parent / "data" / "arithmetic.jsonl"
    parser.add_argument("--target", default="mock", help="backend's name or server's address")
    parser.add_argument("--prompts", type=Path, default=data, help="a prompt and answer a line")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--plot", type=Path, default=Path("reward_curve.png"))
    return parser.parse_args()


def scores_of(group: Group, problem: dict[str, str], tokenizer: Any) -> list[float]:
    """1 for the answer and nothing after it, and a little for the way there."""
    scores, answer = [], problem["answer"]
    for sample in group:
        text = tokenizer.decode(sample.tokens, skip_special_tokens=True)
        exact = text == answer and sample.finish_reason == "stop"
        near = 0.5 if text.startswith(answer) else 0.1 * text[:1].isdigit()
        scores.append(1.0 if exact else near)
    return scores


def group_advantages(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Each score against its group's, [prompts, samples]."""
    centred = scores - scores.mean(axis=1, keepdims=True)
    scaled: npt.NDArray[np.float64] = centred / (scores.std(axis=1, keepdims=True) + 1e-6)
    return scaled


def main(options: argparse.Namespace) -> None:
    problems = [json.loads(line) for line in options.prompts.read_text().splitlines()]
    order, report = np.random.default_rng(0), Report(options.steps)
    loss = losses.PPO(entropy=losses.Entropy(0.2))
    with connect(options.target, start="base") as rl:
        tokenizer = rl.tokenizer().result()
        for step in range(options.steps):
            began = time.perf_counter()
            chosen = [problems[index] for index in order.choice(len(problems), 64)]
            prompts = [tokenizer.encode(problem["prompt"]) for problem in chosen]
            groups = rl.sampling.generate(prompts, SamplingParams(n=16, max_tokens=2)).result()
            scores = np.array([scores_of(*pair, tokenizer) for pair in zip(groups, chosen)])
            batch = Batch.from_groups(groups, advantages=group_advantages(scores))
            backward = rl.training.forward_backward(batch, loss)  # submitted, not waited for
            update = rl.training.optim_step(AdamW(lr=0.01)).result()
            synced, trained = rl.weights.sync(label=step).result(), backward.result()
            report.step(
                step=step,
                reward=float((scores == 1).mean()),  # exact answers only
                loss=trained.value,
                grad_norm=update.grad_norm,
                entropy=trained.metrics["entropy"],
                version=synced.version,
                staleness=int(batch.staleness(trained.version).max()),
                seconds=time.perf_counter() - began,
            )
    report.curve("reward", options.plot)


if __name__ == "__main__":
    main(arguments())
