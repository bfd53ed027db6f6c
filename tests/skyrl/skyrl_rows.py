"""Rows as SkyRL's trainer hands them over, random by a seed; a mock whose gradients can be seen;
and the mock's policy in torch with autograd, under SkyRL's own worker.

Imports numpy, torch, omegaconf and SkyRL (its environment), the mock, the shim's
rows and remote_rl.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from mock_in_torch import policy_outputs
from omegaconf import OmegaConf
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.utils.ppo_utils import (
    PolicyLossRegistry,
    apply_loss_reduction_to_advantages_minibatch,
)
from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase
from skyrl.backends.skyrl_train.workers.worker_utils import BaseBatchIterator
from skyrl.train.config import AlgorithmConfig
from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors

from remote_rl import Session
from remote_rl.losses import Cotangents
from shims.skyrl.batches import padded, placed, to_batch
from shims.skyrl.losses import build_loss, is_named
from shims.skyrl.metrics import mini_batch_metrics
from shims.skyrl.own_losses import evaluate_own_loss, needed_outputs

VOCABULARY = 28
LEARNING_RATE = 0.25
LENGTHS = (3, 1, 6, 4, 0, 5, 2)

Weights = Mapping[str, np.ndarray]


def algorithm(**given: Any) -> AlgorithmConfig:
    """SkyRL's section, checked types and nested sections as from its command line; no KL and
    temperature 0.7 unless asked for."""
    settings = {"use_kl_loss": False, "temperature": 0.7, **given}
    return AlgorithmConfig.from_dict_config(OmegaConf.create(settings))


def skyrl_rows(
    prompts: list[list[int]],
    responses: list[list[int]],
    masks: list[list[float]] | None = None,
    **columns: list[list[float]],
) -> TrainingInputBatch:
    """A batch in SkyRL's layout, by SkyRL's own function. columns: further fields, a list of
    response tokens' values a row."""
    given = [[1.0] * len(row) for row in responses] if masks is None else masks
    tensors = convert_prompts_responses_to_batch_tensors(
        0, prompts, responses, [[0.0] * len(row) for row in responses], given
    )
    sequences, attention, response_mask, _, loss_mask, *_ = tensors
    width = response_mask.shape[1]

    def column(rows: list[list[float]]) -> torch.Tensor:
        dense = np.zeros((len(rows), width), np.float32)
        for place, row in zip(dense, rows, strict=True):
            place[width - len(row) :] = row
        return torch.from_numpy(dense)

    batch = TrainingInputBatch(
        {
            "sequences": sequences,
            "attention_mask": attention,
            "response_mask": response_mask,
            "loss_mask": loss_mask,
            **{name: column(rows) for name, rows in columns.items()},
        }
    )
    batch.metadata = {"response_length": width, "pad_size": 0}
    return batch


def random_rows(
    weights: Weights,
    *,
    random_seed: int = 0,
    lengths: tuple[int, ...] = LENGTHS,
    spread: float = 0.4,
    temperature: float = 0.7,
    loss_reduction: str = "token_mean",
    rollout: bool = True,
) -> TrainingInputBatch:
    """A mini-batch as SkyRL's worker receives it: logprobs of the old policy, the reference and the
    sampler within `spread` of the policy's, advantages of both signs and zero, scaled by SkyRL's
    loss reduction; tokens that don't count, a row without a counted one, one without a token."""
    random = np.random.default_rng(random_seed)
    masks = [(random.random(size) < 0.8).astype(np.float32).tolist() for size in lengths]
    masks[1] = [0.0] * lengths[1]
    masks[0][:1] = [1.0][: lengths[0]]
    # two prompts of the rows are equal
    prompts = [random.integers(2, VOCABULARY, 1 + row // 2).tolist() for row in range(len(lengths))]
    prompts[-1] = prompts[0]
    responses = [random.integers(2, VOCABULARY, size).tolist() for size in lengths]
    rows = skyrl_rows(prompts, responses, masks)
    held = {name: torch.tensor(array) for name, array in weights.items()}
    batch = to_batch(rows, temperature=temperature)
    logprobs = policy_outputs(held, batch)["logprobs"].numpy()
    width, total = int(rows.metadata["response_length"]), len(logprobs)

    def column(values: Any) -> torch.Tensor:
        return padded(batch.responses.with_values(values.astype(np.float32)), width)

    keep = random.random(total) > 0.15
    scaled = apply_loss_reduction_to_advantages_minibatch(
        advantages=column(random.normal(size=total) * keep),
        loss_mask=rows["loss_mask"],
        loss_reduction=loss_reduction,
        micro_batch_size=2,
        max_seq_len=11,
        prompt_boundaries=[(row, row + 1) for row in range(len(lengths))],
    )
    names = ["action_log_probs", "base_action_log_probs"] + ["rollout_logprobs"] * rollout
    rows["advantages"] = scaled
    for name in names:
        rows[name] = column(logprobs + random.normal(size=total) * spread)
    return rows


class MockModel:
    """The mock's policy as SkyRL's worker calls its model: [B, A] float32 logprobs of the last A
    tokens, and an output with `entropy` [B, S] at the slot before each token."""

    def __init__(self, weights: Weights, rows: TrainingInputBatch) -> None:
        self._rows = rows
        self.leaves = {
            name: torch.tensor(each, requires_grad=True) for name, each in weights.items()
        }

    def train(self) -> None:
        """Nothing of the mock depends on it."""

    def __call__(
        self, sequences: torch.Tensor, num_actions: int, *, temperature: float, **options: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert options["compute_entropy"]
        batch = to_batch(self._rows, temperature=temperature)
        found = policy_outputs(self.leaves, batch)
        logprobs = placed(found["logprobs"].float(), self._rows)
        entropy = placed(found["entropy"].float(), self._rows)
        rest = sequences.shape[1] - num_actions
        slots = torch.nn.functional.pad(entropy, (rest - 1, 1))
        return logprobs, {"entropy": slots}


def stock_step(
    section: AlgorithmConfig, weights: Weights, rows: TrainingInputBatch
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What SkyRL's worker makes of the mini-batch as one micro-batch on one rank: its metrics, and
    the gradient by each weight of the mock."""
    model = MockModel(weights, rows)
    worker = SimpleNamespace(
        model=model,
        cfg=SimpleNamespace(algorithm=section),
        policy_loss_fn=PolicyLossRegistry.get(section.policy_loss_type),
        mesh_rank=SimpleNamespace(dp_size=1),
        strategy=SimpleNamespace(backward=lambda loss, *_: loss.backward()),
        optimizer=None,
        scheduler=SimpleNamespace(get_last_lr=lambda: [LEARNING_RATE]),
    )
    experience = BaseBatchIterator.batch_to_experience(rows)
    with warnings.catch_warnings(), mock.patch("torch.cuda.current_device", return_value="cpu"):
        warnings.filterwarnings("ignore", ".*autocast")  # that there is no CUDA to cast on
        status = PolicyWorkerBase._forward_backward_micro(worker, experience, 1.0)  # type: ignore[arg-type]
    status.pop("loss_fn_outputs")
    gradient = {
        name: np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy()
        for name, leaf in model.leaves.items()
    }
    return status, gradient


class Mock:
    """A session on a mock, and what its trainer holds."""

    def __init__(self, session: Session, backend: Any) -> None:
        self.session, self.backend = session, backend

    @property
    def policy(self) -> dict[str, np.ndarray]:
        """The trainer's weights."""
        return dict(self.backend.training.policy.weights)

    def step(
        self, section: AlgorithmConfig, rows: TrainingInputBatch, *, known: bool = False
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """What the shim makes of the mini-batch: metrics, and the gradient that the trainer holds.
        known: the caller has the outputs of these weights."""
        training = self.session.training
        batch = to_batch(rows, temperature=section.temperature or 1.0, training=True)
        outputs = own = None
        if known or not is_named(section, rows):
            outputs = training.forward(batch, outputs=needed_outputs(section)).result()
        if is_named(section, rows):
            loss, batch = build_loss(section, rows, batch)
            result = training.forward_backward(batch, loss).result()
        else:
            assert outputs is not None
            own = evaluate_own_loss(section, rows, outputs)
            cotangents = Cotangents(own.derivatives, version=own.version)
            result = training.forward_backward(batch, cotangents).result()
        gradient = {
            name: each.copy() for name, each in self.backend.training._state.gradient.items()
        }
        training.zero_grad().result()
        metrics = mini_batch_metrics(result, rows, section, LEARNING_RATE, own=own, outputs=outputs)
        return metrics, gradient
