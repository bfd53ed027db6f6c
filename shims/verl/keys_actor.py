"""Shim (loop side, above the client): verl's keys of actor, optimizer, checkpoint, reference and
model.

Imports the rules. `keys` says how the tables are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..common.rules import Irrelevant, Mapped, Only, Rule, Theirs, joined, under
from .rules import CALLED, FILLED, LAYOUT, PRECISION, UNREAD

_ACTOR: Final = "actor_rollout_ref.actor"
_REF: Final = "actor_rollout_ref.ref"
_MODEL: Final = "actor_rollout_ref.model"

_LOSS = Mapped("a field of the loss")
_OWN_LOSS = Mapped("read by verl's own loss function, which the worker runs")
_SENT = Mapped("it arrives with each update, and cuts the mini-batches as verl's iterator does")
_PROFILER = Irrelevant("profiling starts by global_profiler.steps, which is refused")
_NO_LORA = Irrelevant("it shapes a LoRA, and LoRA keys that start one are refused")
_LORA = "LoRA is the server's own configuration"
_QUANTIZED = "quantization-aware training changes what is trained; the shim does not carry it"
_NOT_TRAINED = "it changes what is trained; the shim does not carry it to the server"
_FSDP_STRATEGY = Only(("fsdp", "fsdp2"), "it chooses the sections whose keys the shim maps")
_QAT_DETAILS: Final = (
    "qat.mode qat.group_size qat.ignore_patterns qat.activation_observer "
    "qat.quantization_config_path"
)
_OPTIM_FIELD = Mapped("a field of AdamW")
_SCHEDULE = Mapped("verl's own schedule, moved once an update")

_ACTOR_KEYS = under(
    _ACTOR,
    (
        _LOSS,
        "loss_agg_mode clip_ratio clip_ratio_low clip_ratio_high clip_ratio_c entropy_coeff "
        "use_kl_loss kl_loss_coef",
    ),
    (_OWN_LOSS, "tau_pos tau_neg"),
    (Mapped("its width; required by loss_agg_mode=seq-mean-token-sum-norm"), "loss_scale_factor"),
    (Mapped("the estimator of the KL term; verl's other names are refused"), "kl_loss_type"),
    (_SENT, "ppo_mini_batch_size ppo_epochs shuffle data_loader_seed rollout_n"),
    (Mapped("it arrives with each update; then the entropy is computed"), "calculate_entropy"),
    (CALLED, "_target_"),
    (_PROFILER, "profiler.*"),
    (
        LAYOUT,
        "ppo_micro_batch_size ppo_micro_batch_size_per_gpu use_dynamic_bsz "
        "ppo_max_token_len_per_gpu ppo_infer_micro_batch_size_per_gpu "
        "ppo_infer_max_token_len_per_gpu use_prefix_grouper use_torch_compile use_fused_kernels "
        "ulysses_sequence_parallel_size entropy_from_logits_with_chunking "
        "entropy_from_logits_chunk_size entropy_checkpointing pad_to_length use_remove_padding",
    ),
    (FILLED, "engine model_config global_batch_info"),
    (_FSDP_STRATEGY, "strategy"),
    (Only((False,), _NOT_TRAINED), "freeze_vision_tower"),
    (Only((False,), "no backend declares sum_pi_squared"), "calculate_sum_pi_squared"),
    (Only((False,), "V1 uses them by algorithm.rollout_correction"), "use_rollout_log_probs"),
    (Only((1.0,), "verl's V1 trainer reads actor.optim.clip_grad instead; set that"), "grad_clip"),
    (Only((False,), _QUANTIZED), "qat.enable"),
    (Irrelevant("read with qat.enable only, which is refused"), _QAT_DETAILS),
)

_POLICY_LOSS_KEYS = under(
    f"{_ACTOR}.policy_loss",
    (CALLED, "_target_"),
    (Mapped("a loss by name, or verl's own function; a name nobody knows is refused"), "loss_mode"),
    (
        _OWN_LOSS,
        "clip_cov_ratio clip_cov_lb clip_cov_ub kl_cov_ratio ppo_kl_coef dro_beta "
        "rollout_correction",
    ),
)

_OPTIM_KEYS = under(
    f"{_ACTOR}.optim",
    (CALLED, "_target_"),
    (_OPTIM_FIELD, "lr betas weight_decay"),
    (Mapped("a field of AdamW; must be positive, as verl always clips"), "clip_grad grad_clip"),
    (
        Mapped("lr, betas, eps and weight_decay, what keeps AdamW's formula; all else is refused"),
        "override_optimizer_config",
    ),
    (
        _SCHEDULE,
        "lr_warmup_steps lr_warmup_steps_ratio total_training_steps min_lr_ratio num_cycles "
        "lr_scheduler_type warmup_style zero_indexed_step",
    ),
    (Only(("AdamW",), "remote_rl's optimizer is AdamW"), "optimizer"),
    (Only(("torch.optim",), "remote_rl's AdamW follows torch.optim's formula"), "optimizer_impl"),
)

_CHECKPOINT_KEYS = under(
    f"{_ACTOR}.checkpoint",
    (CALLED, "_target_"),
    (Mapped("model, optimizer and extra; model always, hf_model refused"), "save_contents"),
    (Mapped("model, optimizer and extra; model always, hf_model refused"), "load_contents"),
    (Irrelevant("verl's Megatron engine alone reads it"), "strict"),
    (_NO_LORA, "save_lora_only"),
    (
        Only((False,), "verl then skips its own latest_checkpointed_iteration.txt"),
        "async_save",
    ),
)


def _fsdp(section: str, *, reference: bool) -> dict[str, Rule]:
    """verl's FSDP engine, of the actor or of the reference."""
    return joined(
        under(
            f"{section}.fsdp_config",
            (CALLED, "_target_"),
            (
                LAYOUT,
                "wrap_policy.* param_offload optimizer_offload "
                "offload_policy reshard_after_forward fsdp_size forward_prefetch use_orig_params "
                "ulysses_sequence_parallel_size entropy_from_logits_with_chunking "
                "entropy_from_logits_chunk_size use_torch_compile entropy_checkpointing "
                "use_no_sync_for_gradient_accumulation pad_to_length pad_to_length_bucket",
            ),
            (Irrelevant("verl sets it from the actor's or reference's strategy"), "strategy"),
            (Irrelevant("verl reads it with full_determinism only, which is refused"), "seed"),
            (Irrelevant("of strategy fsdp_turbo, which is refused"), "turbo_config.*"),
            (Irrelevant("read with qat.enable only, which is refused"), _QAT_DETAILS),
            (CALLED, "qat._target_"),
            (
                FILLED,
                "use_dynamic_bsz max_token_len_per_gpu micro_batch_size_per_gpu "
                "infer_max_token_len_per_gpu infer_micro_batch_size_per_gpu use_fused_kernels "
                "use_remove_padding",
            ),
            (Only((False,), _QUANTIZED), "qat.enable"),
            (Only((), "only verl's Megatron and VeOmni engines read it"), "router_replay"),
            (Only((False,), "seed the server; the mock is bit-reproducible"), "full_determinism"),
            (Only(("fp32",), PRECISION), "model_dtype"),
            (Only(("bfloat16",), PRECISION), "dtype"),
            (Only((None,), PRECISION), "mixed_precision"),
            (
                Only((reference,), "verl's own default is the only value that trains"),
                "forward_only",
            ),
        )
    )


_REF_KEYS = under(
    _REF,
    (CALLED, "_target_"),
    (Irrelevant("no mini-batch is cut for the reference"), "rollout_n"),
    (_PROFILER, "profiler.*"),
    (
        LAYOUT,
        "use_torch_compile log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu "
        "log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu ulysses_sequence_parallel_size "
        "entropy_from_logits_with_chunking entropy_from_logits_chunk_size entropy_checkpointing "
        "pad_to_length",
    ),
    (_FSDP_STRATEGY, "strategy"),
)

_MODEL_KEYS = under(
    _MODEL,
    (CALLED, "_target_"),
    (Mapped("its tokenizer and generation config are read here, its weights are not"), "path"),
    (Mapped("imported here and in the worker, for the losses it registers"), "external_lib"),
    (
        Theirs(),
        "hf_config_path tokenizer_path use_shm trust_remote_code custom_chat_template "
        "load_tokenizer",
    ),
    (
        Mapped("attn_implementation is the server's; any other key changes the model: refused"),
        "override_config",
    ),
    (
        LAYOUT,
        "enable_gradient_checkpointing enable_activation_offload use_remove_padding use_liger "
        "use_fused_kernels fused_kernel_options.* tiled_mlp.enabled tiled_mlp.num_shards",
    ),
    (
        _NO_LORA,
        "lora_alpha target_modules exclude_modules lora.type lora.merge lora.alpha lora.dropout "
        "lora.target_modules lora.exclude_modules lora.dropout_position lora.lora_A_init_method "
        "lora.lora_B_init_method lora.a2a_experimental lora.dtype lora.freeze_vision_model "
        "lora.freeze_vision_projection lora.freeze_language_model",
    ),
    (
        Irrelevant("read with mtp.enable only, which is refused"),
        "mtp._target_ mtp.enable_train mtp.enable_rollout mtp.detach_encoder "
        "mtp.mtp_loss_scaling_factor mtp.speculative_algorithm mtp.speculative_num_steps "
        "mtp.speculative_eagle_topk mtp.speculative_num_draft_tokens mtp.method "
        "mtp.num_speculative_tokens",
    ),
    (Only((0,), _LORA), "lora_rank lora.rank"),
    (Only((None,), _LORA), "lora_adapter_path target_parameters lora.adapter_path"),
    (Only((False,), "multi-token prediction is the server's own configuration"), "mtp.enable"),
    (Only(("language_model",), "a run holds one model, the policy"), "model_type"),
    (
        FILLED,
        "local_path local_hf_config_path local_tokenizer_path hf_config generation_config "
        "tokenizer processor architectures",
    ),
)

TABLE: Mapping[str, Rule] = joined(
    _ACTOR_KEYS,
    _POLICY_LOSS_KEYS,
    _OPTIM_KEYS,
    _CHECKPOINT_KEYS,
    _fsdp(_ACTOR, reference=False).items(),
    _REF_KEYS,
    _fsdp(_REF, reference=True).items(),
    _MODEL_KEYS,
    under(
        "actor_rollout_ref",
        (UNREAD, "nccl_timeout"),
    ),
)
