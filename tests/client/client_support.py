"""What the client's tests import from each other: a small mock, a few steps of training, messages
that are kept back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from client_double import Hold
from client_server import Server

from backends.mock import create
from remote_rl import AdamW, Batch, Session, losses

SessionFactory = Callable[..., Session]
ServerFactory = Callable[..., Server]


SMALL: dict[str, Any] = {
    "vocab_size": 12,
    "window": 2,
    "embedding_size": 4,
    "hidden_size": 8,
    "initial_scale": 1.0,
    "eos_token_ids": (),
}


def small_mock(**options: Any) -> Any:
    """A mock backend of a few hundred weights; ids 0 to 11, no end of sequence."""
    return create(**{**SMALL, **options})


def learn(rl: Session, batch: Batch, steps: int = 1, lr: float = 0.05) -> None:
    """A few steps of supervised training."""
    for _ in range(steps):
        rl.training.forward_backward(batch, losses.CrossEntropy())
        rl.training.optim_step(AdamW(lr=lr))
    rl.weights.version().result()


def logprobs(rl: Session, batch: Batch, policy: str = "current") -> list[float]:
    """Of every response token, under a policy."""
    values: list[float] = (
        rl.training.forward(batch, policy=policy).result().logprobs.values.tolist()
    )
    return values


class Doorkeeper:
    """Keeps chosen messages of every client back until a Hold is opened."""

    def __init__(self) -> None:
        self.kept: list[tuple[Callable[[Any], bool], Hold]] = []

    def keep(self, chosen: Callable[[Any], bool]) -> Hold:
        """From now on, messages that `chosen` accepts wait for the Hold that is returned."""
        self.kept.append((chosen, Hold()))
        return self.kept[-1][1]
