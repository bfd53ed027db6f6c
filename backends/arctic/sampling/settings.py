"""Arctic backend: what a sampling engine is started with, and what it is asked to draw (imports
the contract's types; neither torch nor vllm)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import attrs
import numpy as np

from remote_rl.types import SamplingParams
from remote_rl.types.arrays import Array

#: variables that must be set before torch and vllm are imported in the actor's process
ENVIRONMENT: Mapping[str, str] = {
    # the one whose sampler, and whose reload on a CPU, this code knows
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # the engine runs in the actor's own process
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
CPU_ENVIRONMENT: Mapping[str, str] = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",  # compiling costs seconds at the first token and gains nothing
}


@attrs.frozen(kw_only=True)
class SamplerSettings:
    """How one engine runs.

    model: a Hugging Face directory. dtype: of its weights, "float32" or "bfloat16".
    context_length: prompt plus response, at most. device: "cpu" or "cuda".
    version: of the weights in the directory; None where they must not be served before an update.
    sequences: at most so many are drawn at once. batched_tokens: of one step, None is vLLM's
    choice. cache_bytes: of the KV cache, None is what memory_fraction of the device leaves.
    tensor_parallel: GPUs. eager: no compilation and no CUDA graphs. prefix_caching: equal prefixes
    share their KV. recompute_in_flight: an update that keeps running generates recomputes their KV
    with the new weights, so that each token after it is drawn from them alone; False goes on with
    the old KV, which costs nothing and mixes. options: more engine arguments of vLLM, by its names.
    """

    model: str
    dtype: str
    context_length: int
    device: Literal["cpu", "cuda"] = "cpu"
    version: int | None = 0
    sequences: int = 64
    batched_tokens: int | None = None
    cache_bytes: int | None = None
    memory_fraction: float = 0.4
    tensor_parallel: int = 1
    eager: bool = True
    prefix_caching: bool = True
    recompute_in_flight: bool = True
    trust_remote_code: bool = False
    options: Mapping[str, Any] = attrs.field(factory=dict)

    def environment(self) -> dict[str, str]:
        """Variables to set in the process before anything heavy is imported."""
        return {**ENVIRONMENT, **(CPU_ENVIRONMENT if self.device == "cpu" else {})}


def _ids(tokens: Iterable[int]) -> Array:
    return np.asarray(tokens, np.int32)


@attrs.frozen(kw_only=True, eq=False)
class SampleRequest:
    """One response to draw.

    request_id: of the generate that it belongs to; all its samples may bear the same one. tokens:
    the prompt, [p] int32. params: its n is ignored. seed, prompt_index, index: decide the draw,
    and nothing else does.
    """

    request_id: str
    tokens: Array = attrs.field(converter=_ids)
    params: SamplingParams
    seed: int
    prompt_index: int
    index: int
