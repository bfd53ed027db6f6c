"""What the packed, shared, chunked computation is compared with: plain transformers on padded rows,
one row a response, whole logits, torch's autograd.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from remote_rl import losses
from remote_rl.losses import Cotangents, LossBatch, evaluate, resolve
from remote_rl.types import Batch, Ragged

TEMPERATURES = (0.7, 1.0, 1.3)

#: one of each named loss, with every term that adds a cotangent
NAMED_LOSSES: Mapping[str, losses.Loss] = {
    "ppo": losses.PPO(clip_high=0.28, dual_clip=3.0),
    "gspo": losses.PPO(ratio="sequence", aggregation="sequence_mean_token_mean"),
    "ppo with kl and entropy": losses.PPO(
        kl=losses.KL(0.1), entropy=losses.Entropy(0.05), aggregation="sequence_mean_token_sum"
    ),
    "cispo": losses.CISPO(),
    "importance sampling": losses.ImportanceSampling(kl=losses.KL(0.2, estimator="k2")),
    "reinforce": losses.Reinforce(
        aggregation=losses.sequence_mean_token_sum_norm(50), entropy=losses.Entropy(0.3)
    ),
    "cross entropy": losses.CrossEntropy(aggregation="sum"),
}


def plain_outputs(model: Any, batch: Batch) -> dict[str, torch.Tensor]:
    """`logprobs` and `entropy` of each response token, [N], differentiable: right-padded rows,
    one for each response with a token, and the model's own logits."""
    rows = [row for row in range(len(batch)) if len(batch.responses[row])]
    texts = [
        torch.tensor([*batch.prompts[int(batch.prompt_index[row])], *batch.responses[row]])
        for row in rows
    ]
    lengths = torch.tensor([len(text) for text in texts])
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True).long()
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    found: dict[str, list[torch.Tensor]] = {"logprobs": [], "entropy": []}
    for place, row in enumerate(rows):
        stop, count = int(lengths[place]), len(batch.responses[row])
        table = logits[place, stop - count - 1 : stop - 1] / float(batch.temperature[row])
        table = table.log_softmax(-1)
        found["logprobs"].append(table.gather(1, ids[place, stop - count : stop, None])[:, 0])
        found["entropy"].append(-(table.exp() * table).sum(-1))
    return {name: torch.cat(parts) for name, parts in found.items()}


def backward(outputs: Mapping[str, torch.Tensor], loss: losses.Loss, batch: Batch) -> float:
    """Backpropagates a resolved loss of `batch` through `outputs`; its value."""
    dtype = np.float64 if outputs["logprobs"].dtype == torch.float64 else np.float32
    detached = {name: output.detach() for name, output in outputs.items()}
    value = evaluate(loss, LossBatch.from_batch(batch, torch.as_tensor, dtype), detached)
    # an output without a cotangent stays in the graph: a distributed backward needs all of it
    total = sum(
        (output * value.derivatives.get(name, torch.zeros_like(output))).sum()
        for name, output in outputs.items()
    )
    total.backward()
    return value.value


def plain_gradients(model: Any, batch: Batch, loss: losses.Loss) -> dict[str, torch.Tensor]:
    """Name to gradient of the loss of the whole batch."""
    model.zero_grad()
    backward(plain_outputs(model, batch), resolve(loss, batch), batch)
    return gradients_of(model)


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def largest_relative_difference(
    ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
) -> float:
    """The largest difference of all entries, relative to the largest entry of `theirs`."""
    assert ours.keys() == theirs.keys()
    largest = max(float(gradient.abs().max()) for gradient in theirs.values())
    assert largest > 0
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) / largest


def random_batch(
    seed: int,
    *,
    prompt_lengths: tuple[int, ...] = (9, 1, 30, 4),
    response_lengths: tuple[int, ...] = (7, 0, 1, 24, 3, 1, 12, 5, 2),
    vocabulary: int = 300,
    share: bool = True,
) -> Batch:
    """A ragged batch with every field a loss may read: temperatures of TEMPERATURES, random masks,
    row 3 masked out whole. share: rows pick among the prompts, in random order; else one prompt
    a row."""
    random = np.random.default_rng(seed)
    rows = len(response_lengths)
    if not share:
        prompt_lengths = tuple(prompt_lengths[row % len(prompt_lengths)] for row in range(rows))
    index = random.integers(0, len(prompt_lengths), rows) if share else np.arange(rows)

    def per_token(make: Any, dtype: Any) -> Ragged:
        return Ragged.from_rows([make(length) for length in response_lengths], dtype)

    masks = [(random.random(length) < 0.8).astype(np.uint8) for length in response_lengths]
    if rows > 3:
        masks[3] = np.zeros(response_lengths[3], np.uint8)
    logprobs = per_token(lambda length: random.normal(-5.0, 1.0, length), np.float32)
    return Batch(
        prompts=Ragged.from_rows(
            [random.integers(0, vocabulary, length) for length in prompt_lengths], np.int32
        ),
        prompt_index=index.astype(np.int32),
        responses=per_token(lambda length: random.integers(0, vocabulary, length), np.int32),
        temperature=random.choice(np.array(TEMPERATURES, np.float32), rows),
        mask=Ragged.from_rows(masks, np.uint8),
        importance_weights=per_token(lambda length: random.uniform(0.5, 2, length), np.float32),
        advantages=per_token(lambda length: random.normal(0, 1, length), np.float32),
        old_logprobs=logprobs,
        ref_logprobs=logprobs.with_values(
            logprobs.values + random.normal(0, 0.3, len(logprobs.values)).astype(np.float32)
        ),
    )


def random_cotangents(batch: Batch, seed: int = 0) -> Cotangents:
    """One for logprobs and one for entropy, for every token, masked ones too."""
    random = np.random.default_rng(seed)
    size = len(batch.responses.values)
    return Cotangents(
        {
            name: batch.responses.with_values(random.normal(0, 1, size).astype(np.float32))
            for name in ("logprobs", "entropy")
        },
        version=0,
    )
