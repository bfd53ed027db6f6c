"""A loss of one's own: DPO, written in torch, run on the client, on any backend.

The backend computes logprobs and backpropagates; the function and its autograd run here. Needs
torch on the client only.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from remote_rl import AdamW, Batch, connect, losses

BETA = 0.5


def dpo(
    batch: Batch, outputs: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Direct preference optimisation (arXiv:2305.18290); rows are chosen, rejected, chosen, ...

    outputs["logprobs"]: [total], one entry a response token, row after row.
    """
    assert batch.ref_logprobs is not None
    reference = torch.tensor(batch.ref_logprobs.values)
    row = torch.tensor(batch.responses.row_numbers())
    ratio = torch.zeros(len(batch)).index_add(0, row, outputs["logprobs"] - reference)
    margin = BETA * (ratio[0::2] - ratio[1::2])
    loss = -torch.nn.functional.logsigmoid(margin).mean()
    return loss, {"margin": margin.mean(), "preferred": (margin > 0).float().mean()}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    data = Path(__file__).parent / "data" / "arithmetic.jsonl"
    parser.add_argument("--target", default="mock", help="backend's name or server's address")
    parser.add_argument("--data", type=Path, default=data)
    parser.add_argument("--steps", type=int, default=30)
    return parser.parse_args()


def main(options: argparse.Namespace) -> None:
    problems = [json.loads(line) for line in options.data.read_text().splitlines()]
    with connect(options.target, start="base") as rl:
        tokenizer = rl.tokenizer().result()
        pairs = [(p["answer"], str((int(p["answer"]) + 1) % 10)) for p in problems]
        batch = Batch(
            prompts=[tokenizer.encode(problem["prompt"]) for problem in problems],
            prompt_index=np.repeat(np.arange(len(problems)), 2),
            responses=[tokenizer.encode(text) for pair in pairs for text in pair],
            temperature=1.0,
        )
        reference = rl.training.forward(batch, policy="reference").result()
        batch = batch.replace(ref_logprobs=reference.logprobs)
        for step in range(options.steps):
            result = rl.training.forward_backward(batch, losses.custom(dpo))
            rl.training.optim_step(AdamW(lr=0.01))
            trained = result.result()
            if step % 10 == 0 or step == options.steps - 1:
                numbers = {"loss": trained.value, **trained.metrics}
                print(f"step {step}  " + "  ".join(f"{k} {v:.4f}" for k, v in numbers.items()))


if __name__ == "__main__":
    main(arguments())
