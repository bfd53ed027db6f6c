"""Save, stop, resume: the resumed run's rewards are those of one that never stopped."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from remote_rl import AdamW, Batch, SamplingParams, Session, connect, losses

PROBLEMS = [
    json.loads(line)
    for line in (Path(__file__).parent / "data" / "arithmetic.jsonl").read_text().splitlines()
]


def train(rl: Session, steps: range) -> list[float]:
    """GRPO with the answer's first token as the reward; the rewards of each step."""
    tokenizer = rl.tokenizer().result()
    prompts = [tokenizer.encode(problem["prompt"]) for problem in PROBLEMS]
    answers = np.array([tokenizer.encode(problem["answer"])[0] for problem in PROBLEMS])
    rewards = []
    for step in steps:
        groups = rl.sampling.generate(prompts, SamplingParams(n=16, max_tokens=1)).result()
        tokens = np.array([[sample.tokens[0] for sample in group] for group in groups])
        right = (tokens == answers[:, None]).astype(float)
        advantages = right - right.mean(axis=1, keepdims=True)
        batch = Batch.from_groups(groups, advantages=advantages)
        rl.training.forward_backward(batch, losses.PPO())
        rl.training.optim_step(AdamW(lr=0.02))
        rl.weights.sync(label=step).result()  # the next generate must see these weights
        rewards.append(float(right.mean()))
        print(f"step {step}  reward {rewards[-1]!r}")
    return rewards


def main(steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        print("uninterrupted")
        with connect("mock") as rl:
            whole = train(rl, range(2 * steps))

        print("first half")
        with connect("mock", checkpoint_dir=folder) as rl:
            first = train(rl, range(steps))
            rl.training.save("half", metadata={"next_step": steps}).result()

        print("second half, in a new run")
        with connect("mock", checkpoint_dir=folder) as rl:
            loaded = rl.training.load("half").result()  # weights, optimizer, seeds
            rl.weights.sync().result()  # the sampler still serves the base
            second = train(rl, range(loaded.metadata["next_step"], 2 * steps))

    same = first + second == whole
    print(f"resumed rewards {'equal' if same else 'DIFFER from'} the uninterrupted ones")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="of each half")
    main(parser.parse_args().steps)
