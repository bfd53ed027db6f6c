"""Shim (loop side, above the client): SkyRL's keys of policy, reference and critic.

Imports the rules. `keys` says how the tables are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from ..common.rules import Irrelevant, Mapped, Only, Rule, joined, under
from .rules import (
    LAYOUT,
    LORA,
    MODEL,
    NO_CRITIC,
    NO_LORA,
    NO_MEGATRON,
    NO_PROFILER,
    PRECISION,
    QUANTIZED,
)

_POLICY: Final = "trainer.policy"

_OPTIMIZER_KEYS = under(
    f"{_POLICY}.optimizer_config",
    (Mapped("a field of AdamW"), "lr adam_betas weight_decay"),
    (Mapped("a field of AdamW; 0 or less never clips"), "max_grad_norm"),
    (Mapped("transformers' own schedule, moved at every optimizer step"), "scheduler"),
    (Mapped("of that schedule"), "num_warmup_steps"),
    (LAYOUT, "offload_after_step"),
)

_PROFILER_KEYS = under(
    f"{_POLICY}.torch_profiler_config",
    (Only((False,), "the workers it would trace are the server's"), "enable"),
    (
        NO_PROFILER,
        "ranks save_path skip_first wait warmup active repeat activities record_shapes "
        "profile_memory with_stack with_flops with_modules use_gzip export_type",
    ),
)


def _model(section: str, path: Rule) -> Iterable[tuple[str, Rule]]:
    return joined(
        under(
            f"{section}.model",
            (path, "path"),
            (Only((0,), LORA), "lora.rank"),
            (
                NO_LORA,
                "lora.alpha lora.dropout lora.lora_sync_path lora.sync_mode lora.target_modules "
                "lora.exclude_modules lora.init_method lora.share_expert_adapters lora.max_loras "
                "lora.max_cpu_loras",
            ),
            (Only((False,), QUANTIZED), "fake_int4_qat.enabled"),
            (
                Irrelevant("of fake_int4_qat.enabled, which is refused"),
                "fake_int4_qat.group_size fake_int4_qat.symmetric fake_int4_qat.scale_divisor "
                "fake_int4_qat.q_min fake_int4_qat.bf16_base_path",
            ),
        ),
        under(
            section,
            (LAYOUT, "fsdp_config.* sequence_parallel_size"),
            (Only((None,), PRECISION), "fsdp_config.mixed_precision"),
            (Only((), PRECISION), "fsdp_config.mixed_precision.*"),
            (NO_MEGATRON, "megatron_config.*"),
            (Only(({},), MODEL), "model_config_kwargs"),
            (Irrelevant("a run's model reads text alone"), "language_model_only"),
        ),
    ).items()


TABLE: Mapping[str, Rule] = joined(
    _OPTIMIZER_KEYS,
    _PROFILER_KEYS,
    _model(
        _POLICY,
        Mapped("the tokenizer, and the name in messages; the weights are those of the server"),
    ),
    under(
        _POLICY,
        (LAYOUT, "use_torch_compile record_memory"),
        (
            Only((False,), "the server holds its optimizer ready; leave it as it is"),
            "inference_only_init",
        ),
    ),
    _model("trainer.ref", Mapped("it has to be the policy's: the reference is the run's own")),
    under(
        "trainer.critic",
        (
            Only((None,), "a run holds one model, the policy; set an estimator without values"),
            "model.path",
        ),
        (
            NO_CRITIC,
            "model.lora.* model.fake_int4_qat.* optimizer_config.* fsdp_config.* "
            "sequence_parallel_size model_config_kwargs",
        ),
    ),
)
