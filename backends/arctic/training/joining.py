"""Arctic backend: what DeepSpeed is told, and how ranks meet (imports deepspeed, torch,
remote_rl's errors)."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable
from typing import Any

import deepspeed
import deepspeed.ops
import torch
import torch.distributed

from remote_rl.errors import ConflictError, RemoteRLError, describe

Configuration = dict[str, Any]


def configuration(
    stage: int, world: int, dtype: torch.dtype, bucket_elements: int
) -> Configuration:
    """What DeepSpeed is told. The caller says where gradients end (`step`), clips, and measures."""
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": False,
        "reduce_bucket_size": bucket_elements,
        "allgather_bucket_size": bucket_elements,
    }
    if stage in (1, 2):
        zero["compute_grad_norm"] = False  # PolicyAdamW does
    if stage == 3:
        zero["sub_group_size"] = 1 << 60  # one, so that one optimizer step sees all
        zero["stage3_prefetch_bucket_size"] = bucket_elements
    told: Configuration = {
        "train_batch_size": world,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,
        "steps_per_print": 1 << 60,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if dtype is torch.bfloat16:
        told["bf16"] = {"enabled": True, "check_grad_overflow": False}
        told["data_types"] = {"grad_accum_dtype": "fp32"}
    return told


def join(device: torch.device, rank: int, world: int) -> None:
    """Meets the other ranks; MASTER_ADDR and MASTER_PORT are set."""
    os.environ.setdefault("LOCAL_RANK", "0")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed 0.19 calls what torch 2.13 has given another name
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # DeepSpeed's own collective over shared memory would be compiled at the first start, and its
    # ranks spin for ever where one of them dies; gloo tells them
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend="nccl" if device.type == "cuda" else "gloo",
        auto_mpi_discovery=False,
        verbose=False,
        rank=rank,
        world_size=world,
    )


def leave() -> None:
    """Ends what `join` began."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def agree(failure: RemoteRLError | None) -> None:
    """Raises on every rank where one of them failed, so that none goes on alone into a collective
    that the others never join."""
    failures: list[RemoteRLError | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(failures, failure)
    if failure is not None:
        raise failure
    for rank, other in enumerate(failures):
        if other is not None:
            raise type(other)(f"rank {rank}: {other}", **other.details)


def agree_on_files(what: str, failures: Iterable[OSError | None]) -> None:
    """`ConflictError` on every rank where one of them could not write its files."""
    for error in failures:
        if error is not None:
            failure = ConflictError(
                f"the {what} could not be written ({describe(error)}); make room for it, or choose "
                "another directory, and try again"
            )
            failure.__cause__ = error
            agree(failure)
    agree(None)
