"""Arctic backend: what a rank is made of and what it answers, without torch, since other processes
read it (imports config, the manifest and remote_rl's errors, losses and types)."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from remote_rl.errors import UnsupportedError
from remote_rl.losses import Metric
from remote_rl.types.flops import DecoderShape

from ..config import LoraConfig
from ..weights.manifest import Form


@attrs.frozen(kw_only=True)
class RankSettings:
    """What a rank is made of.

    path: a Hugging Face directory. dtype: "float32", or "bfloat16" for forward and backward with
    float32 masters, which needs ZeRO 2 or 3. zero_stage: of DeepSpeed, 0 to 3. device: "cpu" or
    "cuda" (then the first that the process sees). head_chunk: response tokens whose logits exist at
    once. gradient_checkpointing: recompute activations in the backward pass. lora: None trains all
    weights. seed: of what is initialised at random. bucket_elements: numbers that one collective
    carries.
    """

    path: str
    dtype: str = "float32"
    zero_stage: int = 2
    device: str = "cpu"
    head_chunk: int = 256
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False
    lora: LoraConfig | None = None
    seed: int = 0
    bucket_elements: int = 50_000_000

    def __attrs_post_init__(self) -> None:
        if self.dtype == "bfloat16" and self.zero_stage < 2:
            raise UnsupportedError(
                f"model.dtype 'bfloat16' needs training.zero_stage 2 or 3, not {self.zero_stage}: "
                "DeepSpeed keeps no float32 gradients of such a model below"
            )


@attrs.frozen(kw_only=True)
class RankFacts:
    """forms: shape and dtype tag of each tensor that `publish` writes, in its order. parameters:
    numbers in them. trained: numbers that are trained. vocab_size: rows of the output layer;
    token ids lie below it. masters: bytes of the float32 weights that this rank owns. device: the
    name that the rank's device gives itself, "cpu" of a CPU. shape: what the count of FLOPs needs;
    None where they are not counted, and then uncounted says why."""

    forms: Mapping[str, Form]
    parameters: int
    trained: int
    vocab_size: int
    masters: int
    device: str
    shape: DecoderShape | None
    uncounted: str | None


@attrs.frozen
class RankLoss:
    """A rank's part of a loss: its value (they add up), its metrics (they merge), and the positions
    that it computed, prompts once for each piece."""

    value: float
    metrics: Mapping[str, Metric]
    tokens: int


@attrs.frozen
class StepResult:
    """grad_norm: 2-norm of the whole gradient before clipping, NaN or infinite where it is not
    finite. skipped: whether nothing was changed. steps: taken so far."""

    grad_norm: float
    skipped: bool
    steps: int
