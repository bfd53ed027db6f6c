"""Arctic backend: how the engine's process is made; light, since both sides import it (imports
config)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import ArcticConfig

if TYPE_CHECKING:
    from .host import Reports


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
        return not os.path.exists("/dev/nvidiactl")
    return device == "cpu"
