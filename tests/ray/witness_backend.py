"""A backend that says where the arrays lie that it is given, and does nothing else; and a batch of
40 MB for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from remote_rl import Batch, Ragged, losses
from remote_rl.protocol import Capabilities, ModelInfo
from remote_rl.types import ForwardBackwardResult, Outputs

FIELDS = ("prompts", "responses", "mask", "advantages", "old_logprobs", "ref_logprobs")
LOSS = losses.PPO(kl=losses.KL(coef=0.1))
ROWS, LENGTH = 512, 4096


def large_batch() -> Batch:
    """All that `LOSS` needs."""
    random = np.random.default_rng(0)

    def floats() -> Any:
        return random.normal(size=(ROWS, LENGTH)).astype(np.float32)

    batch = Batch(
        prompts=random.integers(0, 1000, (ROWS, 2048), np.int32),
        prompt_index=np.arange(ROWS),
        responses=random.integers(0, 1000, (ROWS, LENGTH), np.int32),
        temperature=1.0,
        advantages=floats(),
        old_logprobs=floats(),
        ref_logprobs=floats(),
    )
    assert sum(array.nbytes for array in arrays_of(batch).values()) > 39e6
    return batch


def mapping_of(array: np.ndarray[Any, Any]) -> str:
    """The file whose memory the array's first number lies in; empty where it is none's."""
    address = array.ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, name = line.split(None, 5) if line.count("/") else [*line.split(), ""]
        first, last = (int(bound, 16) for bound in span.split("-"))
        if first <= address < last:
            return name if "/" in name else ""
    return ""


def is_in_the_store(array: np.ndarray[Any, Any]) -> bool:
    """A view into the object store that nobody can write to."""
    return not array.flags.owndata and not array.flags.writeable and "plasma" in mapping_of(array)


def arrays_of(batch: Batch) -> dict[str, np.ndarray[Any, Any]]:
    """The values of every field that is a long array."""
    return {name: getattr(batch, name).values for name in FIELDS}


class Witness:
    """Trainer and sampler."""

    async def forward(self, request: Any, context: Any) -> Outputs:
        """The position of each token, as its logprob."""
        responses = request.batch.responses
        values = -np.arange(len(responses.values), dtype=np.float32)
        return Outputs(
            values={"logprobs": Ragged(values, responses.offsets)}, version=context.version
        )

    async def forward_backward(self, request: Any, context: Any) -> ForwardBackwardResult:
        """For each field whether it lies in the store."""
        found = arrays_of(request.batch)
        metrics = {name: float(is_in_the_store(array)) for name, array in found.items()}
        total = float(sum(array.sum(dtype=np.float64) for array in found.values()))
        return ForwardBackwardResult(value=total, metrics=metrics, version=context.version)

    async def zero_grad(self, request: Any, context: Any) -> None:
        """Nothing."""


class WitnessBackend:
    """The protocol's least, around `Witness`."""

    name = "witness"
    seed = 0
    model = ModelInfo(name="witness", vocab_size=1 << 17)
    capabilities = Capabilities(
        operations={"forward", "forward_backward", "zero_grad"},
        outputs={"logprobs"},
        losses={"PPO"},
    )

    def __init__(self) -> None:
        self.training = self.sampling = self.weights = Witness()

    def sampler_version(self) -> tuple[int, None]:
        return 0, None

    async def start(self, context: Any) -> None:
        context.progress(0, 1, "opens its eyes")

    async def close(self) -> None:
        pass

    def kill(self) -> None:
        pass
