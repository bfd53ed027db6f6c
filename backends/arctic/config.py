"""Arctic backend: its options, checked before anything heavy starts (imports the contract's
fields)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import attrs

from remote_rl.errors import InvalidRequestError
from remote_rl.types.fields import (
    Validator,
    as_tuple,
    each,
    flag,
    instance_of,
    integer,
    number,
    one_of,
    optional,
    plain,
    strict,
    text,
)

Class = TypeVar("Class")

DTYPES = ("float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
WEIGHT_PATHS = ("auto", "shared_memory", "cuda_ipc", "gloo", "nccl")


def as_config(cls: type[Class], value: Any) -> Any:
    """A mapping of a class's fields to an instance; all else stays."""
    return cls(**value) if isinstance(value, Mapping) else value


def _is_table(cls: type[Any]) -> Validator:
    return instance_of(cls, wanted=f"a table of {cls.__name__}'s fields")


def _count(default: int, minimum: int = 1) -> Any:
    return attrs.field(default=default, converter=plain, validator=integer(minimum=minimum))


def _maybe_count() -> Any:
    return attrs.field(default=None, converter=plain, validator=optional(integer(minimum=1)))


def _as_path(value: Any) -> Any:
    return str(value) if hasattr(value, "__fspath__") else value


@strict
@attrs.frozen(kw_only=True)
class ModelConfig:
    """Which model.

    path: a Hugging Face directory (config.json, safetensors, tokenizer files); nothing is
    downloaded. name: what clients know it by (the path). dtype: of forward and backward, "float32"
    or "bfloat16" (then the optimizer keeps float32 masters). context_length: prompt plus response
    at most, None is what the model's configuration says. trust_remote_code: run Python that the
    directory brings along.
    """

    path: str = attrs.field(converter=_as_path, validator=text())
    name: str | None = attrs.field(default=None, validator=optional(text()))
    dtype: str = attrs.field(default="float32", validator=one_of(DTYPES))
    context_length: int | None = _maybe_count()
    trust_remote_code: bool = attrs.field(default=False, validator=flag())


@strict
@attrs.frozen(kw_only=True)
class LoraConfig:
    """Low-rank adapters instead of all weights (arXiv:2106.09685). rank; alpha: the product is
    scaled by alpha / rank; targets: names of the linear layers, as peft's target_modules."""

    rank: int = _count(16)
    alpha: float = attrs.field(default=32.0, converter=plain, validator=number(above=0))
    targets: tuple[str, ...] = attrs.field(
        default=("q_proj", "k_proj", "v_proj", "o_proj"),
        converter=as_tuple,
        validator=each(text()),
    )


def _as_lora(value: Any) -> Any:
    return as_config(LoraConfig, value)


@strict
@attrs.frozen(kw_only=True)
class TrainingConfig:
    """How the trainer runs.

    ranks: processes of data parallelism. zero_stage: of DeepSpeed, what is partitioned over ranks:
    0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too. token_budget: packed tokens in
    one forward and backward pass, which is what peak memory follows. head_chunk: response tokens
    whose logits exist at once. gradient_checkpointing: recompute activations in the backward pass.
    lora: None trains all weights. threads: of each rank on a CPU, None shares the cores.
    """

    ranks: int = _count(1)
    zero_stage: int = attrs.field(default=2, converter=plain, validator=one_of((0, 1, 2, 3)))
    token_budget: int = _count(8192)
    head_chunk: int = _count(256)
    gradient_checkpointing: bool = attrs.field(default=False, validator=flag())
    lora: LoraConfig | None = attrs.field(
        default=None,
        converter=_as_lora,
        validator=optional(_is_table(LoraConfig)),
    )
    threads: int | None = _maybe_count()


@strict
@attrs.frozen(kw_only=True)
class SamplingConfig:
    """How the sampler runs.

    engines: vLLM engines. tensor_parallel: GPUs of each. dtype: of its weights, None is the
    model's. cache_gib: GiB of each engine's KV cache on a CPU. memory_fraction: of a GPU's memory
    for an engine. sequences: at most so many drawn at once by an engine. batched_tokens: of one
    engine step, None is vLLM's choice. prefix_caching: reuse the KV of equal prefixes. eager: no
    compilation and no CUDA graphs, None is eager on a CPU only. threads: of each engine on a CPU.
    """

    engines: int = _count(1)
    tensor_parallel: int = _count(1)
    dtype: str | None = attrs.field(default=None, validator=optional(one_of(DTYPES)))
    cache_gib: int = _count(1)
    memory_fraction: float = attrs.field(
        default=0.4, converter=plain, validator=number(above=0, maximum=1)
    )
    sequences: int = _count(64)
    batched_tokens: int | None = _maybe_count()
    prefix_caching: bool = attrs.field(default=True, validator=flag())
    eager: bool | None = attrs.field(default=None, validator=optional(flag()))
    threads: int | None = _maybe_count()


@strict
@attrs.frozen(kw_only=True)
class WeightsConfig:
    """How weights get from trainer to sampler. path: "shared_memory" (one machine, any device),
    "cuda_ipc" (colocated, a rank beside each engine), "nccl" (halves apart, on GPUs of any
    machines) or "gloo" (any machines and devices, over TCP); "auto" is cuda_ipc where it can be,
    and shared_memory elsewhere. A push goes through shared memory. patience: seconds after which a
    broadcast (gloo, nccl) in which nothing moves is given up."""

    path: str = attrs.field(default="auto", validator=one_of(WEIGHT_PATHS))
    patience: float = attrs.field(default=60.0, converter=plain, validator=number(above=0))


@strict
@attrs.frozen(kw_only=True)
class PlacementConfig:
    """Where it runs.

    address: of a Ray cluster ("auto", "host:port"); None starts one of its own and ends it.
    device: "cpu", "cuda", or "auto": cuda where there is a GPU. colocated: trainer and sampler
    share the GPUs. swap: of colocated halves, an operation that needs one puts the other to sleep;
    False leaves both awake, for GPUs that hold both. object_store_mib: of an own
    cluster. start_timeout: seconds after which a start that makes no progress is given up,
    and a half that is put to sleep or woken counts as hung.
    """

    address: str | None = attrs.field(default=None, validator=optional(text()))
    device: str = attrs.field(default="auto", validator=one_of(DEVICES))
    colocated: bool = attrs.field(default=False, validator=flag())
    swap: bool = attrs.field(default=True, validator=flag())
    object_store_mib: int = _count(256, minimum=80)
    start_timeout: float = attrs.field(default=300.0, converter=plain, validator=number(above=0))


def _as_model(value: Any) -> Any:
    if value is None:
        raise InvalidRequestError(
            "the arctic backend needs a model; pass model=, the path of a Hugging Face directory",
            field="model",
        )
    if isinstance(value, str) or hasattr(value, "__fspath__"):
        return ModelConfig(path=value)
    return as_config(ModelConfig, value)


def _as_training(value: Any) -> Any:
    return as_config(TrainingConfig, value)


def _as_sampling(value: Any) -> Any:
    return as_config(SamplingConfig, value)


def _as_weights(value: Any) -> Any:
    return as_config(WeightsConfig, value)


def _as_placement(value: Any) -> Any:
    return as_config(PlacementConfig, value)


@strict
@attrs.frozen(kw_only=True)
class ArcticConfig:
    """Options of the arctic backend, the keyword arguments of `connect("arctic", ...)` and the
    tables of `remote-rl serve arctic --config FILE.toml`. model: a path, or ModelConfig's fields.
    seed: of generates that bring none, and of what is initialised at random."""

    model: ModelConfig = attrs.field(converter=_as_model, validator=instance_of(ModelConfig))
    training: TrainingConfig = attrs.field(
        factory=TrainingConfig,
        converter=_as_training,
        validator=_is_table(TrainingConfig),
    )
    sampling: SamplingConfig = attrs.field(
        factory=SamplingConfig,
        converter=_as_sampling,
        validator=_is_table(SamplingConfig),
    )
    weights: WeightsConfig = attrs.field(
        factory=WeightsConfig,
        converter=_as_weights,
        validator=_is_table(WeightsConfig),
    )
    placement: PlacementConfig = attrs.field(
        factory=PlacementConfig,
        converter=_as_placement,
        validator=_is_table(PlacementConfig),
    )
    seed: int = attrs.field(
        default=0, converter=plain, validator=integer(minimum=0, maximum=2**63 - 1)
    )

    def __attrs_post_init__(self) -> None:
        if self.model.dtype == "bfloat16" and self.training.zero_stage < 2:
            raise InvalidRequestError(
                "model.dtype 'bfloat16' needs training.zero_stage 2 or 3; DeepSpeed has other "
                f"optimizers at {self.training.zero_stage}",
                field="dtype",
            )
        if self.placement.colocated and self.sampling.tensor_parallel > 1:
            raise InvalidRequestError(
                "sampling.tensor_parallel above 1 can't be colocated: an engine shares the GPU of "
                "the rank of its number; use sampling.engines, or placement.colocated false",
                field="tensor_parallel",
            )
        if self.placement.device == "cpu":
            refused = {
                "weights.path": self.weights.path in ("cuda_ipc", "nccl"),
                "sampling.tensor_parallel": self.sampling.tensor_parallel > 1,
                "placement.colocated": self.placement.colocated,
            }
            for name, wrong in refused.items():
                if wrong:
                    raise InvalidRequestError(
                        f"{name} needs GPUs, and this run is on a CPU (placement.device)",
                        field=name,
                    )
        elif self.weights.path == "cuda_ipc" and not self.beside:
            raise InvalidRequestError(
                "weights.path 'cuda_ipc' needs placement.colocated and a rank for each engine: an "
                "engine reads from the rank on its own GPU; use 'shared_memory'",
                field="weights.path",
            )
        elif self.weights.path == "nccl" and self.placement.colocated:
            raise InvalidRequestError(
                "weights.path 'nccl' needs placement.colocated false: NCCL takes one process to a "
                "GPU; use 'cuda_ipc', which colocated halves take by themselves",
                field="weights.path",
            )

    @property
    def beside(self) -> bool:
        """Whether each engine has a rank on its own GPU."""
        return self.placement.colocated and self.sampling.engines <= self.training.ranks
