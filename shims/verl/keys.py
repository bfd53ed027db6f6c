"""Shim (loop side, above the client): every configuration key the shim knows, by section.

Imports attrs only. A key is one of four kinds; whatever is in none of the tables is refused by
name at start-up (`config.check_keys`), so that nothing is silently ignored:

* MAPPED: the shim translates it.
* VERL: verl itself acts on it, above the hooks that the shim fills.
* ENGINE: how a local engine lays out or speeds up the same computation; the server's own
  configuration decides that, and no value of it changes what is computed.
* Only(...): the shim can honour these values and refuses all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from . import NAME

MAPPED: Final = "mapped"
VERL: Final = "verl"
ENGINE: Final = "engine"


@attrs.frozen
class Only:
    """values: the legal ones. because: why no other is, and what to do."""

    values: tuple[Any, ...]
    because: str


Rule = str | Only
Section = Mapping[str, Rule]


def _all(kind: str, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), kind)


_REMOTE_LAYOUT = "the accelerators belong to the server, whose own configuration lays them out"
_NOT_YET = "the shim does not carry it to the server"

ACTOR: Section = {
    **_all(
        MAPPED,
        "optim policy_loss checkpoint loss_agg_mode loss_scale_factor clip_ratio clip_ratio_low "
        "clip_ratio_high clip_ratio_c entropy_coeff use_kl_loss kl_loss_coef kl_loss_type",
    ),
    # these arrive with the call of update_actor, or only shape what verl sends
    **_all(
        VERL,
        "_target_ rollout_n ppo_mini_batch_size ppo_epochs shuffle data_loader_seed "
        "calculate_entropy tau_pos tau_neg",
    ),
    **_all(
        ENGINE,
        "fsdp_config ppo_micro_batch_size ppo_micro_batch_size_per_gpu use_dynamic_bsz "
        "ppo_max_token_len_per_gpu ppo_infer_micro_batch_size_per_gpu "
        "ppo_infer_max_token_len_per_gpu use_prefix_grouper use_torch_compile use_fused_kernels "
        "ulysses_sequence_parallel_size entropy_from_logits_with_chunking "
        "entropy_from_logits_chunk_size entropy_checkpointing pad_to_length use_remove_padding",
    ),
    # `grad_clip`: verl's engines read `optim.clip_grad` instead
    **_all(ENGINE, "grad_clip profiler qat"),
    "strategy": Only(("fsdp", "fsdp2"), "it chooses the sections whose keys the shim maps"),
    "freeze_vision_tower": Only((False,), "it changes what is trained; " + _NOT_YET),
    "calculate_sum_pi_squared": Only((False,), "no backend declares the output sum_pi_squared"),
    "use_rollout_log_probs": Only((False,), "V1 computes them by algorithm.rollout_correction"),
}

POLICY_LOSS: Section = {
    **_all(MAPPED, "loss_mode"),
    # verl's own loss functions read them
    **_all(
        VERL,
        "_target_ clip_cov_ratio clip_cov_lb clip_cov_ub kl_cov_ratio ppo_kl_coef dro_beta "
        "rollout_correction",
    ),
}

OPTIM: Section = {
    **_all(
        MAPPED,
        "lr betas weight_decay clip_grad lr_warmup_steps lr_warmup_steps_ratio "
        "total_training_steps min_lr_ratio num_cycles lr_scheduler_type warmup_style "
        "zero_indexed_step override_optimizer_config grad_clip",
    ),
    **_all(VERL, "_target_"),
    "optimizer": Only(("AdamW",), "remote_rl's optimizer is AdamW"),
    "optimizer_impl": Only(("torch.optim",), "remote_rl's AdamW follows torch.optim's formula"),
}

CHECKPOINT: Section = {
    **_all(MAPPED, "save_contents load_contents"),
    **_all(ENGINE, "_target_ strict save_lora_only"),
    "async_save": Only((False,), "verl then skips its own latest_checkpointed_iteration.txt"),
}

REF: Section = {
    **_all(VERL, "_target_ rollout_n"),
    **_all(
        ENGINE,
        "fsdp_config strategy use_torch_compile log_prob_micro_batch_size "
        "log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz "
        "log_prob_max_token_len_per_gpu profiler ulysses_sequence_parallel_size "
        "entropy_from_logits_with_chunking entropy_from_logits_chunk_size "
        "entropy_checkpointing pad_to_length",
    ),
}

ROLLOUT: Section = {
    **_all(
        MAPPED,
        "engine_kwargs prompt_length response_length max_model_len top_p top_k temperature "
        "calculate_log_probs free_cache_engine logprobs_mode",
    ),
    **_all(
        VERL,
        "_target_ mode n do_sample val_kwargs multi_turn agent trace n_gpus_per_node "
        "log_prob_use_dynamic_bsz prometheus disaggregation checkpoint_engine seed server custom",
    ),
    **_all(
        ENGINE,
        "dtype gpu_memory_utilization standalone_gpu_memory_utilization enforce_eager "
        "cudagraph_capture_sizes max_num_batched_tokens max_num_seqs enable_chunked_prefill "
        "enable_prefix_caching scheduling_policy load_format layered_summon layer_name_map "
        "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu "
        "log_prob_max_token_len_per_gpu disable_log_stats multi_stage_wake_up "
        "skip_tokenizer_init profiler mtp qat sglang_engine_mode enable_sleep_mode "
        "moe_tensor_parallel_size limit_images",
    ),
    "name": Only((NAME,), f"trainer mode {NAME!r} samples from the same server as it trains on"),
    "nnodes": Only((0,), "standalone rollout nodes belong to the separate_async mode"),
    "tensor_model_parallel_size": Only((1,), _REMOTE_LAYOUT),
    "data_parallel_size": Only((1,), _REMOTE_LAYOUT),
    "expert_parallel_size": Only((1,), _REMOTE_LAYOUT),
    "pipeline_model_parallel_size": Only((1,), _REMOTE_LAYOUT),
    "ignore_eos": Only((False,), "the server ends a response at its end-of-sequence ids"),
    "repetition_penalty": Only((1.0,), "it changes the distribution; " + _NOT_YET),
    "full_determinism": Only((False,), "the server's run has its own seed"),
    "enable_rollout_routing_replay": Only((False,), "the server returns no routed experts"),
    "quantization": Only((None,), "the server decides how it serves the weights"),
    "quantization_config_file": Only((None,), "the server decides how it serves the weights"),
    "over_sample_rate": Only((0,), "verl reads it in the sglang engine alone"),
    "moe_load_balance_metrics_interval": Only((0,), "the server returns no routed experts"),
    "router_config_path": Only((None,), "agent loops talk to the server themselves"),
    "checkpoint_manager_class": Only((None,), "weights go from trainer to sampler on the server"),
}

MODEL: Section = {
    **_all(MAPPED, "path"),
    **_all(
        VERL,
        "_target_ hf_config_path tokenizer_path use_shm trust_remote_code custom_chat_template "
        "external_lib override_config",
    ),
    **_all(
        ENGINE,
        "enable_gradient_checkpointing enable_activation_offload use_remove_padding lora_alpha "
        "target_modules exclude_modules use_liger use_fused_kernels fused_kernel_options "
        "tiled_mlp",
    ),
    "lora_rank": Only((0,), "LoRA is the server's own configuration"),
    "lora_adapter_path": Only((None,), "LoRA is the server's own configuration"),
    "lora": MAPPED,
    "mtp": MAPPED,
    "target_parameters": Only((None,), "LoRA is the server's own configuration"),
}

ALGORITHM: Section = {
    **_all(MAPPED, "adv_estimator rollout_correction"),
    **_all(
        VERL,
        "_target_ gamma lam norm_adv_by_std_in_grpo filter_groups use_kl_in_reward kl_penalty "
        "kl_ctrl use_pf_ppo pf_ppo",
    ),
}

#: sections whose keys are all known, by their path
SECTIONS: Mapping[str, Section] = {
    "actor_rollout_ref.actor": ACTOR,
    "actor_rollout_ref.actor.policy_loss": POLICY_LOSS,
    "actor_rollout_ref.actor.optim": OPTIM,
    "actor_rollout_ref.actor.checkpoint": CHECKPOINT,
    "actor_rollout_ref.ref": REF,
    "actor_rollout_ref.rollout": ROLLOUT,
    "actor_rollout_ref.model": MODEL,
    "algorithm": ALGORITHM,
}

#: single keys of sections that are otherwise verl's own
SINGLE_KEYS: Mapping[str, Only] = {
    "trainer.n_gpus_per_node": Only((1,), _REMOTE_LAYOUT + "; one worker forwards to it"),
    "trainer.nnodes": Only((1,), _REMOTE_LAYOUT + "; one worker forwards to it"),
    "trainer.default_hdfs_dir": Only((None,), "checkpoints stay in the server's checkpoint_dir"),
    "actor_rollout_ref.hybrid_engine": Only((True,), "False belongs to the separate_async mode"),
    "actor_rollout_ref.actor.fsdp_config.qat.enable": Only((False,), "it changes what is trained"),
    "actor_rollout_ref.actor.qat.enable": Only((False,), "it changes what is trained"),
    "actor_rollout_ref.model.lora.rank": Only((0,), "LoRA is the server's own configuration"),
    "actor_rollout_ref.model.lora.adapter_path": Only(
        (None,), "LoRA is the server's own configuration"
    ),
    "actor_rollout_ref.model.mtp.enable": Only((False,), "the server decides how it speculates"),
    "actor_rollout_ref.rollout.checkpoint_engine.backend": Only(
        ("naive",), "weights go from trainer to sampler on the server"
    ),
    "actor_rollout_ref.rollout.disaggregation.enabled": Only((False,), _REMOTE_LAYOUT),
    "actor_rollout_ref.rollout.prometheus.enable": Only(
        (False,), "the server exports its own metrics"
    ),
    "distillation.enabled": Only((False,), "its losses need more than logprobs and entropies"),
    "global_profiler.steps": Only((None,), "the worker only forwards; profile the server"),
}
