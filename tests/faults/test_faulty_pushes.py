"""Parts of a push are lost, sent twice, late, out of order and cut, and the sampler ends with the
same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from faults_support import small_mock
from hypothesis import given, settings
from hypothesis import strategies as st

from remote_rl import connect
from remote_rl.testing import LoopbackServer
from remote_rl.testing.faults import Faults

#: a push is a dozen messages, so that most of them suffer
LOSSY: dict[str, float] = {
    "lose_request": 0.1,
    "lose_response": 0.1,
    "cut_request": 0.1,
    "cut_response": 0.1,
    "duplicate": 0.3,
    "reorder": 0.3,
    "reorder_seconds": 0.01,
}


def served(backend: Any) -> dict[str, bytes]:
    """What the sampler holds."""
    return {name: each.tobytes() for name, each in backend.sampling.served.weights.items()}


def tensors_of(backend: Any, seed: int) -> dict[str, Any]:
    """Every tensor of the model, of other numbers."""
    rng = np.random.default_rng(seed)
    weights = backend.training.policy.weights
    return {name: rng.normal(size=each.shape) for name, each in weights.items()}


@pytest.mark.parametrize("over", ["inprocess", "http"])
@given(seed=st.integers(0, 2**32), part_bytes=st.integers(8, 200))
@settings(max_examples=5, deadline=None)
def test_parts_that_suffer_end_at_the_same_bits(over: str, seed: int, part_bytes: int) -> None:
    backend, faults = small_mock(), Faults(seed=seed, **LOSSY)
    server = LoopbackServer(backend) if over == "http" else None
    target: Any = backend if server is None else server.url
    try:
        with connect(target, wrap_transport=faults.wrap) as rl:
            for number in (1, 2):
                tensors = tensors_of(backend, seed + number)
                push = rl.weights.push(tensors, label=number, part_bytes=part_bytes)
                version = rl.weights.version()
                assert push.result(120).version == number
                assert (version.result(120).sampler, version.result().label) == (number, number)
                assert served(backend) == {name: each.tobytes() for name, each in tensors.items()}
            parts = [call for call in backend.calls if call.operation == "push_part"]
            pushes = [call for call in backend.calls if call.operation == "push"]
            assert len({call.request_id for call in parts}) == len(parts) / 2  # begun, ended
            assert len(pushes) == 4
            assert {call.event for call in (*parts, *pushes)} == {"started", "ended"}
    finally:
        if server is not None:
            server.stop()
    assert sum(faults.injected.values()) > 0
