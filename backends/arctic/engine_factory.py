"""Arctic backend: how the engine's process is made, and on what; light, since both sides import it
(imports config and the contract's errors)."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import attrs

from remote_rl.errors import InvalidRequestError

from .config import ArcticConfig

if TYPE_CHECKING:
    from .host import Reports

#: how a sync carries weights
Way: TypeAlias = Literal["shared_memory", "cuda_ipc", "gloo", "nccl"]

_DEVICES = Path("/dev")
_RAY_SECONDS = 10  # that Ray waits for a node to register, unless told otherwise


def create_engine(
    config: ArcticConfig, sampler_version: int | None, directory: Path, reports: Reports
) -> Any:
    """The engine, not started. sampler_version: of the base weights that the sampler has after
    its start, None where they stand for no version and must not be served before a sync."""
    from .engine import Engine

    return Engine(config, sampler_version, directory, reports)


def environment(config: ArcticConfig) -> dict[str, str]:
    """Variables of the engine's process and of all its workers, beside the backend's own; those
    that only vLLM reads are set where it is imported (`SamplerSettings.environment`)."""
    variables = {
        # nothing is ever downloaded
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        # Ray warns about its own future default otherwise
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    if config.placement.address is None:
        # of its first node, too few on a machine that does much else. Half of what a start may
        # take, so that what Ray says of one that never comes is still heard
        patience = max(_RAY_SECONDS, int(config.placement.start_timeout / 2))
        variables["RAY_raylet_start_wait_time_s"] = str(patience)
    if on_cpu(config):
        variables |= {
            "DS_ACCELERATOR": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": str(config.sampling.cache_gib),
            # eager on a CPU: compiling costs seconds at the first token and gains nothing here
            "TORCHDYNAMO_DISABLE": "1",
            # ranks and engines share the cores: threads that spin at barriers starve each other
            "OMP_WAIT_POLICY": "PASSIVE",
            "GOMP_SPINCOUNT": "0",
            "KMP_BLOCKTIME": "0",
        }
    return variables


def on_cpu(config: ArcticConfig) -> bool:
    """Whether the engine runs without GPUs; "auto" looks for the driver's devices."""
    device = config.placement.device
    if device == "auto":
        return not (_DEVICES / "nvidiactl").exists()
    return device == "cpu"


def way_of(config: ArcticConfig) -> Way:
    """What `weights.path` means for a sync: the GPUs' own where each engine has a rank beside it,
    shared memory elsewhere."""
    if config.weights.path != "auto":
        return cast("Way", config.weights.path)
    return "cuda_ipc" if config.beside and not on_cpu(config) else "shared_memory"


def with_device(config: ArcticConfig) -> ArcticConfig:
    """The configuration with "auto" decided, once and here, since every process and machine of a
    run must read the same. Raises `InvalidRequestError` for what the device can't do, and where a
    cluster of our own would wait for GPUs that this machine hasn't."""
    device = "cpu" if on_cpu(config) else "cuda"
    config = attrs.evolve(config, placement=attrs.evolve(config.placement, device=device))
    wanted, have = _wanted_gpus(config), _visible_gpus()
    if device == "cuda" and config.placement.address is None and wanted > have:
        raise InvalidRequestError(
            f"training.ranks, sampling.engines and sampling.tensor_parallel come to {wanted} GPUs, "
            f"and this machine shows {have}; lower them, set placement.colocated for one GPU to "
            "each rank and engine of one number, or placement.device 'cpu'",
            field="placement.device",
        )
    return config


def _wanted_gpus(config: ArcticConfig) -> int:
    ranks, engines = config.training.ranks, config.sampling.engines
    if config.placement.colocated:
        return max(ranks, engines)
    return ranks + engines * config.sampling.tensor_parallel


def _visible_gpus() -> int:
    """As Ray counts them: what CUDA_VISIBLE_DEVICES lets through, else the driver's devices."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return len([each for each in named.split(",") if each.strip() not in ("", "-1")])
    return sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in _DEVICES.iterdir())
