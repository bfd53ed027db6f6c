"""Command line: `remote-rl demo` (imports commands.values; the client, losses and types when it
runs)."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs

from .values import add_access, read_token

if TYPE_CHECKING:
    from ..client import Session

NAME = "demo"
SUMMARY = "train a small policy to add digits, here or on a server"
DESCRIPTION = """\
Teaches a policy to add two digits by GRPO, and prints what happens. Without a target it trains the
mock inside this process: no accelerator, no server, nothing to download.

  $ remote-rl demo

The same on a server, in another terminal or on another machine:

  $ remote-rl serve mock
  $ remote-rl demo --target http://127.0.0.1:7700

A run that somebody has trained already asks where to begin: --start base throws its weights away,
--start current goes on from them.
"""
#: what goes wrong in a demo it says itself
LOG_LEVEL = "warning"
#: the task: every sum of two digits that is itself one digit
SUMS = [(left, right) for left in range(10) for right in range(10 - left)]
#: answers to each prompt in one step
SAMPLES = 16
LEARNING_RATE = 0.01
#: how many steps are shown, besides the last
_LINES = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's own arguments."""
    parser.add_argument(
        "--target",
        default="mock",
        help="a backend's name, run inside this process, or http://HOST:PORT of a server "
        "(%(default)s)",
    )
    parser.add_argument("--steps", type=_positive, default=50, help="updates (%(default)s)")
    parser.add_argument(
        "--seed", type=int, help="of a run in this process; a server's run has its own"
    )
    parser.add_argument(
        "--start",
        metavar="FROM",
        help="base, current or a checkpoint's name; needed where the server's run is not fresh",
    )
    add_access(parser)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of steps; it is 1 or more")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Trains, and says what it does."""
    from ..client import connect
    from ..progress_line import ProgressLine
    from .curve import curve

    options: dict[str, Any] = {} if arguments.seed is None else {"seed": arguments.seed}
    if arguments.token_file is not None:
        options["token"] = read_token(arguments.token_file)
    line, began = ProgressLine(), time.monotonic()
    rewards: list[float] = []
    every = max(1, arguments.steps // _LINES)
    with connect(
        arguments.target, start=arguments.start, ca_file=arguments.ca_file, **options
    ) as rl:
        print(_introduction(arguments, rl), flush=True)
        for step in train(rl, arguments.steps):
            rewards.append(step.reward)
            if step.number % every == 0 or step.number == arguments.steps - 1:
                line.clear()
                print(step.as_line(), flush=True)
            else:
                line.show(f"step {step.number} of {arguments.steps}")
        line.clear()
    last = rewards[-5:]
    print(f"\n{curve(rewards, 'reward over steps')}")
    print(
        f"reward: {rewards[0]:.3f} in the first step, {sum(last) / len(last):.3f} in the last; "
        f"{time.monotonic() - began:.0f} s"
    )
    print(_WHAT_NEXT)
    return 0


@attrs.frozen(kw_only=True)
class Step:
    """What one step came to. reward: the share of right answers. said: one prompt and what the
    policy answered. version: of the weights that the sampler now serves."""

    number: int
    reward: float
    grad_norm: float
    version: int
    said: str

    def as_line(self) -> str:
        """One line for the terminal."""
        return (
            f"step {self.number:3d}  reward {self.reward:.3f}  grad_norm {self.grad_norm:<8.3g}"
            f"  weights version {self.version}  it says {self.said}"
        )


def train(rl: Session, steps: int) -> Iterator[Step]:
    """GRPO: every prompt is answered several times, and an answer's advantage is its score against
    those of its prompt."""
    import numpy as np

    from ..losses import PPO, Entropy
    from ..types import AdamW, Batch, SamplingParams

    tokenizer = rl.tokenizer().result()
    prompts = [tokenizer.encode(f"{left}+{right}=") for left, right in SUMS]
    params = SamplingParams(n=SAMPLES, max_tokens=1)
    loss = PPO(entropy=Entropy(0.2))  # the entropy term keeps it trying
    for number in range(steps):
        groups = rl.sampling.generate(prompts, params).result()
        texts = np.array([[tokenizer.decode(each.tokens) for each in group] for group in groups])
        exact = texts == np.array([[str(left + right)] for left, right in SUMS])
        scores = np.where(exact, 1.0, 0.1 * np.char.isdigit(texts))  # a little for any digit
        spread = scores.std(axis=1, keepdims=True) + 1e-6
        advantages = (scores - scores.mean(axis=1, keepdims=True)) / spread
        rl.training.forward_backward(Batch.from_groups(groups, advantages=advantages), loss)
        update = rl.training.optim_step(AdamW(lr=LEARNING_RATE)).result()
        synced = rl.weights.sync(label=number).result()
        shown = number * 7 % len(SUMS)  # another sum each time
        yield Step(
            number=number,
            reward=float(exact.mean()),
            grad_norm=update.grad_norm,
            version=synced.version,
            said=f"{SUMS[shown][0]}+{SUMS[shown][1]}={_printable(str(texts[shown, 0]))}",
        )


def _printable(text: str) -> str:
    """A byte that is no character of its own is common before it has learned anything."""
    return text if text.isascii() and text.isprintable() and text else "?"


def _introduction(arguments: argparse.Namespace, rl: Session) -> str:
    from ..transports.choice import is_address

    info = rl.info().result()
    where = f"at {arguments.target}" if is_address(arguments.target) else "in this process"
    size = f" of {info.model.parameters:,} numbers" if info.model.parameters else ""
    return (
        f"A policy{size} ({info.backend}, {where}) learns to add two digits.\n"
        f"Each step has {len(SUMS)} prompts, {SAMPLES} answers to each, one update, and one sync "
        "of the weights to the sampler."
    )


_WHAT_NEXT = """\

The loop that did this is a page of Python: examples/grpo.py. docs/quickstart.md explains its
calls, docs/testing-your-loop.md how to test your own. On a server:

  $ remote-rl serve mock
  $ remote-rl demo --target http://127.0.0.1:7700"""
