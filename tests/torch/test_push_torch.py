"""Tensors of torch in a push: their bits, and that those of a device come to the host one at a time
where they go in parts."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from backends.mock import create
from remote_rl import connect
from remote_rl.client.pushes import plan_of

SMALL: dict[str, Any] = {
    "vocab_size": 12,
    "window": 2,
    "embedding_size": 4,
    "hidden_size": 8,
    "eos_token_ids": (),
}


class OnDevice:
    """A tensor as one on a GPU answers: its numbers come by `cpu`. copies: those that were given,
    of all such tensors, as far as somebody holds them; counts: how many that were, each time."""

    def __init__(self, tensor: Any, copies: list[Any], counts: list[int]) -> None:
        self._tensor, self._copies, self._counts = tensor, copies, counts
        self.shape, self.dtype = tensor.shape, tensor.dtype

    def detach(self) -> OnDevice:
        return self

    def cpu(self) -> Any:
        copy = self._tensor.clone()
        self._copies.append(weakref.ref(copy))
        self._counts.append(sum(each() is not None for each in self._copies))
        return copy


def served(backend: Any) -> dict[str, bytes]:
    return {name: each.tobytes() for name, each in backend.sampling.served.weights.items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32", "float64"])
def test_in_parts_or_not_the_bits_are_the_same(dtype: str) -> None:
    backend = create(**SMALL)
    held = []
    with connect(backend) as rl:
        generator = torch.Generator().manual_seed(3)
        tensors = {
            name: torch.randn(each.shape, generator=generator).to(getattr(torch, dtype))
            for name, each in backend.training.policy.weights.items()
        }
        for given in (tensors, {name: OnDevice(each, [], []) for name, each in tensors.items()}):
            for part_bytes in (None, 10):
                rl.weights.push(given, part_bytes=part_bytes).result(60)
                held.append(served(backend))
    assert all(each == held[0] for each in held)


def test_tensors_of_a_device_come_to_the_host_one_at_a_time() -> None:
    copies: list[Any] = []
    counts: list[int] = []
    with connect(create(**SMALL)) as rl:
        numbers = {f"t{number}": torch.full((64,), number) for number in range(20)}
        tensors = {name: OnDevice(each, copies, counts) for name, each in numbers.items()}
        plan = plan_of(rl.weights, tensors, 1000)
        assert plan is not None
        assert counts == []  # the plan needs none of their numbers
        seen = []
        for request in plan.requests("t", "policy"):
            for name, piece in request.pieces.items():
                seen.append((name, piece.data.tobytes()))
            del request, piece
        # those of a part, and one that was cut
        assert len(counts) == 20
        assert max(counts) <= 4
    whole: dict[str, bytes] = {}
    for name, data in seen:
        whole[name] = whole.get(name, b"") + data
    assert whole == {name: each.numpy().tobytes() for name, each in numbers.items()}
