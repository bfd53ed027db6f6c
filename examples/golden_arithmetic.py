"""GRPO that teaches a real model, SmolLM2-135M-Instruct, one-digit sums on two CPU cores.

Problems and scores are reasoning-gym's. The engines run in a process and an environment of their
own; this one needs no torch: `pip install 'remote-rl[demo,tokenizer]' reasoning-gym`.

    (engines) $ remote-rl serve arctic --config golden_arithmetic.toml
    (loop)    $ python golden_arithmetic.py --target http://127.0.0.1:7700 --seed 0

With `--model DIRECTORY` instead of a target, the engines run below this process. Each seed writes
its numbers into the folder of `--out`, and all seeds there make one picture.
"""

from __future__ import annotations

import argparse
import json
import re
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
import reasoning_gym
from golden_curves import draw
from reporting import Report

from remote_rl import AdamW, Batch, Group, SamplingParams, Session, connect, losses

Problem: TypeAlias = dict[str, Any]
Scores: TypeAlias = npt.NDArray[np.float64]

TASK = reasoning_gym.create_dataset(
    "chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1, size=2000, seed=0
)
#: all 200 that there are; the first 60 are never trained on
PROBLEMS: list[Problem] = list({problem["question"]: problem for problem in TASK}.values())
HELD_OUT, TRAINED_ON = PROBLEMS[:60], PROBLEMS[60:]
MAX_TOKENS = 32


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--target", help="address of `remote-rl serve arctic`")
    where.add_argument("--model", type=Path, help="directory of convert_smollm2.py, to run here")
    parser.add_argument("--seed", type=int, default=0, help="of problems and samples (%(default)s)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=12, help="in a step (%(default)s)")
    parser.add_argument("--samples", type=int, default=8, help="of each prompt (%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-5, help="constant (%(default)s)")
    parser.add_argument("--evaluate-every", type=int, default=5, metavar="N")
    parser.add_argument("--short", action="store_true", help="2 small steps, to see that it works")
    parser.add_argument("--out", type=Path, default=Path("golden_arithmetic"), help="for results")
    return parser.parse_args()


def open_session(options: argparse.Namespace) -> Session:
    """On a server, from the base weights; or with engines of this process's own."""
    if options.target is not None:
        return connect(options.target, start="base")
    settings = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    return connect("arctic", **{**settings, "model": str(options.model)})


def prompt_of(problem: Problem, tokenizer: Any) -> list[int]:
    """The question through the model's own chat template."""
    chat = [{"role": "user", "content": problem["question"]}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(text, add_special_tokens=False))


def scores_of(groups: Sequence[Group], problems: list[Problem], tokenizer: Any) -> Scores:
    """reasoning-gym's, of the last number in each response, [prompts, samples]: 1 for the right
    one, less than 1 for one whose digits hold the right one's, 0 else."""

    def score(tokens: Any, problem: Problem) -> float:
        numbers = re.findall(r"-?\d+", tokenizer.decode(tokens, skip_special_tokens=True))
        return float(TASK.score_answer(numbers[-1] if numbers else None, problem))

    pairs = zip(groups, problems, strict=True)
    return np.array([[score(each.tokens, problem) for each in group] for group, problem in pairs])


def advantages_of(scores: Scores) -> Scores:
    """Each score against its group's, [prompts, samples]."""
    centred: Scores = scores - scores.mean(axis=1, keepdims=True)
    return np.asarray(centred / (scores.std(axis=1, keepdims=True) + 1e-4))


def evaluate(rl: Session, problems: list[Problem], tokenizer: Any) -> dict[str, float]:
    """Mean scores on problems that are never trained on: of greedy answers, and of two samples to
    each, always drawn with the same seed."""
    prompts = [prompt_of(problem, tokenizer) for problem in problems]
    params = SamplingParams(max_tokens=MAX_TOKENS, n=2, seed=0)
    sampled = rl.sampling.generate(prompts, params)
    greedy = rl.sampling.generate(prompts, attrs.evolve(params, n=1, temperature=0))
    return {
        "held_out_greedy": float(scores_of(greedy.result(), problems, tokenizer).mean()),
        "held_out_sampled": float(scores_of(sampled.result(), problems, tokenizer).mean()),
    }


def train_step(
    rl: Session, step: int, problems: list[Problem], tokenizer: Any, options: argparse.Namespace
) -> dict[str, float]:
    """Samples, scores, one update, one sync; what it came to."""
    began = time.perf_counter()
    prompts = [prompt_of(problem, tokenizer) for problem in problems]
    seed = 10_000 * options.seed + step
    params = SamplingParams(n=options.samples, max_tokens=MAX_TOKENS, seed=seed)
    groups = rl.sampling.generate(prompts, params).result()
    sampled = time.perf_counter()
    scores = scores_of(groups, problems, tokenizer)
    batch = Batch.from_groups(groups, advantages=advantages_of(scores))
    backward = rl.training.forward_backward(batch, losses.PPO())  # submitted, not waited for
    optimizer = AdamW(lr=options.lr, weight_decay=0.0, max_grad_norm=1.0)
    update = rl.training.optim_step(optimizer).result()
    rl.weights.sync(label=step).result()
    trained = backward.result()
    return {
        "reward": float(scores.mean()),
        "tokens": float(batch.responses.lengths.mean()),
        "loss": trained.value,
        "grad_norm": update.grad_norm,
        "mismatch": trained.metrics["approximate_kl_k3"],  # of sampler and trainer
        "sampling": sampled - began,
        "seconds": time.perf_counter() - began,
    }


def main(options: argparse.Namespace) -> None:
    held_out = HELD_OUT
    if options.short:
        options.steps, options.prompts, options.samples, held_out = 2, 4, 4, HELD_OUT[:8]
    options.out.mkdir(parents=True, exist_ok=True)
    order, began = np.random.default_rng(options.seed), time.perf_counter()
    log = options.out / f"seed_{options.seed}.jsonl"
    with open_session(options) as rl, log.open("w") as lines:
        tokenizer = rl.tokenizer().result()
        report, evaluations = Report(options.steps + 1), []
        for step in range(options.steps + 1):
            row: dict[str, float] = {"step": step}
            if step % options.evaluate_every == 0 or step == options.steps:
                evaluations.append(evaluate(rl, held_out, tokenizer))
                row |= evaluations[-1]
            if step < options.steps:
                chosen = order.choice(len(TRAINED_ON), options.prompts, replace=False)
                problems = [TRAINED_ON[index] for index in chosen]
                row |= train_step(rl, step, problems, tokenizer, options)
            print(json.dumps(row), file=lines, flush=True)
            report.step(**row)
    report.bar.close()
    print(f"picture: {draw(options.out)}")
    print(f"mean scores of {len(held_out)} held-out problems, {time.perf_counter() - began:.0f} s:")
    for name, before in evaluations[0].items():
        print(f"  {name}: {before:.3f} before, {evaluations[-1][name]:.3f} after")


if __name__ == "__main__":
    main(arguments())
