"""Shim (loop side, above the client): every key of SkyRL's configuration, by its full path.

Imports the tables and the rules of all shims, which say how a table is read. A key of SkyRL's own
sections that has no rule is refused by name where it is set away from its default
(`config.check_keys`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..common.rules import Irrelevant, Mapped, Only, Rule, Theirs, joined, under
from . import keys_generator, keys_policy
from .rules import LAYOUT, NO_CRITIC, PRECISION, by_mode

_ALGORITHM: Final = "trainer.algorithm"
_PLACEMENT: Final = "trainer.placement"

_LOSS = Mapped("a field of the loss, or read by SkyRL's own loss function, which runs here")
_OWN_LOSS = Mapped("read by SkyRL's own loss function, which runs here")
_MEGATRON = Irrelevant("of trainer.strategy=megatron, which is refused")
_NO_SIMULATION = Irrelevant("of fully_async.simulate_training, which is refused")
_ADVANTAGES = Theirs()

_ALGORITHM_KEYS = under(
    _ALGORITHM,
    (
        _ADVANTAGES,
        "advantage_estimator kl_ctrl.type kl_ctrl.kl_target kl_ctrl.horizon use_kl_in_reward "
        "advantage_batch_normalize loss_reduction grpo_norm_by_std zero_variance_filter "
        "zero_variance_filter_tol lambd gamma dynamic_sampling.type "
        "dynamic_sampling.max_sample_batches dynamic_sampling.min_replace_ratio max_seq_len",
    ),
    (
        _LOSS,
        "policy_loss_type eps_clip_low eps_clip_high clip_ratio_c use_kl_loss kl_loss_coef "
        "kl_estimator_type use_entropy_loss entropy_loss_coef",
    ),
    (
        _OWN_LOSS,
        "off_policy_correction.tis_ratio_type off_policy_correction.token_tis_ratio_clip_high "
        "off_policy_correction.sequence_tis_ratio_clip_high "
        "off_policy_correction.sequence_mask_metric off_policy_correction.geo_mask_high "
        "off_policy_correction.geo_mask_low off_policy_correction.product_mask_high "
        "off_policy_correction.product_mask_low "
        "off_policy_correction.outlier_token_is_threshold_low "
        "off_policy_correction.outlier_token_is_threshold_high "
        "off_policy_correction.token_mask_is_threshold_low "
        "off_policy_correction.token_mask_is_threshold_high sapo.tau_pos sapo.tau_neg "
        "clip_cov.clip_ratio clip_cov.clip_cov_lb clip_cov.clip_cov_ub kl_cov.kl_cov_frac "
        "kl_cov.ppo_kl_coef cispo.cispo_eps_clip_low cispo.cispo_eps_clip_high cispo.cispo_anchor "
        "dppo.dppo_type dppo.delta_low dppo.delta_high",
    ),
    (Mapped("the temperature of the policy's logprobs"), "temperature"),
    (NO_CRITIC, "value_head_prefix value_clip"),
    (
        Only((-1.0,), "SkyRL deprecated it; set off_policy_correction.token_tis_ratio_clip_high"),
        "tis_imp_ratio_cap",
    ),
    (
        Only((False,), "SkyRL deprecated it; set off_policy_correction.tis_ratio_type=token"),
        "use_tis",
    ),
    (
        Only((False,), "logprobs are those of the full vocabulary; leave the support alone"),
        "enable_sample_support_replay",
    ),
)

_PLACEMENT_KEYS = under(
    _PLACEMENT,
    (
        Irrelevant("the server places its halves itself; SkyRL's cluster gives no accelerator"),
        "colocate_all colocate_policy_ref policy_num_nodes policy_num_gpus_per_node ref_num_nodes "
        "ref_num_gpus_per_node",
    ),
    (NO_CRITIC, "critic_num_nodes critic_num_gpus_per_node"),
)

_ASYNC_KEYS = under(
    "trainer.fully_async",
    (Mapped("it chooses the trainer"), "enabled"),
    (
        Theirs(),
        "max_staleness_steps num_parallel_generation_workers sample_full_batch",
    ),
    (
        by_mode(
            sync=Irrelevant("of fully_async.enabled"),
            fully_async=Irrelevant(
                "whether a prefix that older weights computed is used again is the server's own "
                "configuration"
            ),
        ),
        "clear_kv_cache_on_weight_sync",
    ),
    (Only((False,), "nothing would be trained, so no run is needed"), "simulate_training"),
    (_NO_SIMULATION, "simulate_training_step_seconds simulate_weight_sync_seconds"),
)

_TRAINER_KEYS = under(
    "trainer",
    (
        Only(
            ("fsdp", "fsdp2"),
            "it chooses the sections whose keys the shim maps; leave it as it is",
        ),
        "strategy",
    ),
    (
        LAYOUT,
        "use_expandable_segments sequence_parallel_backend gradient_checkpointing "
        "gradient_checkpointing_use_reentrant micro_forward_batch_size_per_gpu "
        "max_tokens_per_microbatch remove_microbatch_padding flash_attn logprobs_chunk_size "
        "vocab_entropy_chunk_size vocab_entropy_chunk_memory_mb fused_lm_head_logprob "
        "fused_lm_head_logprob_backend",
    ),
    (Irrelevant("SkyRL's own cluster writes there, and none is started"), "log_path"),
    (
        Mapped(
            "SkyRL's order of prompts; what is drawn for them follows the seed of the server's "
            "own configuration"
        ),
        "seed",
    ),
    (
        Theirs(),
        "resume_mode resume_path ckpt_path max_ckpts_to_keep ckpt_interval hf_save_interval "
        "export_path epochs max_training_steps update_epochs_per_batch train_batch_size "
        "policy_mini_batch_size recompute_old_logprobs_per_minibatch update_ref_every_epoch "
        "eval_batch_size eval_before_train eval_interval max_prompt_length disable_fast_tokenizer "
        "project_name run_name logger tags dump_data_batch dump_eval_results "
        "print_example_interval num_logger_eval_samples num_logger_train_samples "
        "log_example_interval",
    ),
    (
        Mapped(
            "SkyRL's loss_reduction=token_mean_legacy reads it; else the server cuts its own "
            "micro-batches"
        ),
        "micro_train_batch_size_per_gpu",
    ),
    (NO_CRITIC, "critic_mini_batch_size"),
    (Only((True,), PRECISION), "bf16"),
    (
        Irrelevant("it watches accelerators of SkyRL's own cluster; the server has /metrics"),
        "enable_ray_gpu_monitor",
    ),
    (Mapped("the shim's own options"), "remote.*"),
    (Only((False,), "multi-token prediction trains heads that a run does not hold"), "mtp.enabled"),
    (Irrelevant("of mtp.enabled, which is refused"), "mtp.num_speculative_tokens mtp.loss_weight"),
)

TABLE: Mapping[str, Rule] = joined(
    _ALGORITHM_KEYS,
    _PLACEMENT_KEYS,
    _ASYNC_KEYS,
    _TRAINER_KEYS,
    keys_policy.TABLE.items(),
    keys_generator.TABLE.items(),
)
