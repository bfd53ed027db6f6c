"""Rows as verl's V1 trainer sends them with update_actor, random by a seed; a mock whose gradients
can be seen; and verl's own loss on the mock's policy in torch.

Imports torch, tensordict, omegaconf and verl (verl's environment), numpy, the mock, the shim's
rows and remote_rl.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mock_in_torch import policy_outputs
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.workers.utils.losses import ppo_loss

from backends.mock import create
from remote_rl import Sample, Session, connect
from shims.verl.batches import counted_tokens, ragged, sequence_slots, to_batch
from shims.verl.config import Options
from shims.verl.worker import ForwardingWorker

VOCABULARY = 28


def jagged(rows: list[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Rows as a jagged tensor."""
    tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


def random_rows(
    weights: Mapping[str, Any],
    *,
    random_seed: int = 0,
    lengths: tuple[int, ...] = (3, 1, 6, 4, 2, 5),
    spread: float = 0.4,
    weighted: bool = False,
    **call: Any,
) -> TensorDict:
    """What verl sends with update_actor: old logprobs within `spread` of the policy's, advantages
    of both signs and zero, tokens that don't count, a row without a counted one, and perhaps
    `rollout_is_weights`. call: the values that travel with the call."""
    random = np.random.default_rng(random_seed)
    masks = [(random.random(size) < 0.8).astype(np.int64) for size in lengths]
    masks[1][:] = 0
    masks[0][0] = 1
    prompts = [random.integers(2, VOCABULARY, 1 + row // 3).tolist() for row in range(len(lengths))]
    responses = [random.integers(2, VOCABULARY, size) for size in lengths]
    tensors = {
        "prompts": jagged(prompts),
        "responses": jagged(responses),
        "response_mask": jagged(masks),
        "loss_mask": jagged(masks),
    }
    values = {
        "temperature": 0.7,
        "calculate_entropy": True,
        "mini_batch_size": len(lengths),
        "global_batch_size": len(lengths),
        "epochs": 1,
        "seed": 42,
        "dataloader_kwargs": {"shuffle": False},
    }
    rows = tensordict_utils.get_tensordict(tensors, {**values, **call})
    held = {name: torch.tensor(array) for name, array in weights.items()}
    logprobs = policy_outputs(held, to_batch(rows))["logprobs"].numpy()
    bounds = np.cumsum(lengths)[:-1]

    def column(values: Any) -> torch.Tensor:
        return jagged(np.split(np.asarray(values), bounds), torch.float32)

    total = len(logprobs)
    keep = random.random(total) > 0.15
    rows["advantages"] = column(random.normal(size=total) * keep)
    rows["old_log_probs"] = column(logprobs + random.normal(size=total) * spread)
    rows["ref_log_prob"] = column(logprobs + random.normal(size=total) * spread)
    if weighted:
        rows["rollout_is_weights"] = column(random.exponential(1.0, total))
    return rows


def stock_step(
    actor: Any, weights: Mapping[str, Any], rows: TensorDict
) -> tuple[float, dict[str, Any], dict[str, np.ndarray]]:
    """verl's loss of the mini-batch in one piece, in float32, its metrics, and its gradient by each
    weight of the mock."""
    leaves = {name: torch.tensor(array, requires_grad=True) for name, array in weights.items()}
    outputs = policy_outputs(leaves, to_batch(rows))
    offsets, slots = sequence_slots(ragged(rows, "prompts"), ragged(rows, "responses"))
    names = {"log_probs": "logprobs"}
    if tensordict_utils.get(rows, "calculate_entropy"):
        names["entropy"] = "entropy"
    placed = {
        theirs: torch.nested.nested_tensor_from_jagged(
            torch.zeros(int(offsets[-1])).index_copy(
                0, torch.from_numpy(slots), outputs[ours].float()
            ),
            offsets=torch.from_numpy(offsets),
        )
        for theirs, ours in names.items()
    }
    data = rows.copy()
    tensordict_utils.assign_non_tensor(
        data,
        dp_size=1,
        batch_num_tokens=counted_tokens(rows),
        global_batch_size=tensordict_utils.get(rows, "global_batch_size"),
    )
    value, metrics = ppo_loss(actor, placed, data)
    value.backward()
    gradient = {
        name: np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy()
        for name, leaf in leaves.items()
    }
    return float(value.detach()), metrics, gradient


def replaced(section: Any, *overrides: str) -> Any:
    """A dataclass of verl's with `key=value` overrides; a merge of verl's whole configuration takes
    a second."""
    return _replaced(section, OmegaConf.to_container(OmegaConf.from_dotlist(list(overrides))))


def _replaced(section: Any, changes: Any) -> Any:
    given = {
        name: _replaced(getattr(section, name), value) if isinstance(value, dict) else value
        for name, value in changes.items()
    }
    return dataclasses.replace(section, **given)


class Mock:
    """A session on a mock, and the gradient that its trainer holds when each step arrives."""

    def __init__(self, session: Session, backend: Any) -> None:
        self.session, self.backend = session, backend
        self.weights = self.training = self  # the faces that `update` uses
        self.gradients: list[dict[str, np.ndarray]] = []

    def version(self) -> Any:
        return self.session.weights.version()

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self.session.training.forward(*arguments, **options)

    def forward_backward(self, batch: Any, loss: Any) -> Any:
        operation = self.session.training.forward_backward(batch, loss)
        operation.result()
        self.gradients.append(dict(self.backend.training._state.gradient))
        return operation

    def optim_step(self, adamw: Any) -> Any:
        return self.session.training.optim_step(adamw)

    @property
    def policy(self) -> dict[str, np.ndarray]:
        return dict(self.backend.training.policy.weights)


def sample() -> Sample:
    """Two tokens of version 2, the end token the second."""
    return Sample(
        tokens=[7, 1],
        logprobs=[-0.5, -0.25],
        finish_reason="stop",
        first_version=2,
        last_version=2,
        label=1,
        prompt_index=0,
        index=0,
    )


class Log(list[Any]):
    """The mock's call log, which says when the first generate has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.generating = threading.Event()

    def append(self, call: Any) -> None:
        super().append(call)
        if call.operation == "generate":
            self.generating.set()


class AttachedWorker(ForwardingWorker):
    """The worker on a session of the test, without verl's process group."""

    def __init__(self, config: Any, session: Session) -> None:
        self._config, self._given = config, session
        self._options = Options.of(config.rollout)

    def _attach(self) -> Session:
        return self._given


class Run:
    """A worker on a mock of its own, and what reached the mock."""

    def __init__(self, session: Session, backend: Any, log: list[Any], config: Any) -> None:
        self.session, self.backend, self.log = session, backend, log
        self.worker = AttachedWorker(config.actor_rollout_ref, session)
        self.worker.init_model()

    def requests(self, operation: str) -> list[Any]:
        """The requests of that operation, in order."""
        begun = [call for call in self.log if call.event == "started"]
        return [call.request for call in begun if call.operation == operation]

    def update(self, rows: TensorDict) -> dict[str, list[float]]:
        """The metrics of `update_actor`."""
        done = self.worker.update_actor(rows)
        metrics: dict[str, list[float]] = tensordict_utils.get(done, "metrics")
        return metrics

    @property
    def policy(self) -> dict[str, np.ndarray]:
        """The trainer's weights."""
        return dict(self.backend.training.policy.weights)


@contextmanager
def running(
    config: Callable[..., Any], *overrides: str, checkpoint_dir: Path | None = None
) -> Iterator[Run]:
    """A run by verl's configuration; five updates are its whole training."""
    log: list[Any] = []
    backend = create(vocab_size=VOCABULARY, initial_scale=1.0, call_log=log)
    whole = config("actor_rollout_ref.actor.optim.total_training_steps=5", *overrides)
    with connect(backend, checkpoint_dir=checkpoint_dir) as session:
        yield Run(session, backend, log, whole)
