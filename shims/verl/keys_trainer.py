"""Shim (loop side, above the client): verl's keys of algorithm, trainer and data, and of what is
around them.

Imports the rules. `keys` says how the tables are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..common.rules import Irrelevant, Mapped, Not, Only, Rule, Theirs, joined, under
from . import ASYNC_NAME, NAME
from .rules import CALLED, REMOTE_LAYOUT, UNREAD, by_mode

_SEPARATE: Final = "trainer.v1.separate_async"
_V1 = "verl's V1 trainer reads it nowhere"
_NO_CRITIC = Irrelevant("a critic is refused (critic.enable, algorithm.adv_estimator=gae)")
_OTHER_MODE = Irrelevant("of another mode of verl's V1 trainer")

_ALGORITHM_KEYS = under(
    "algorithm",
    (CALLED, "_target_ filter_groups._target_ kl_ctrl._target_"),
    (
        Mapped("verl's own, without a critic (gae) and without sum_pi_squared (the baselines)"),
        "adv_estimator",
    ),
    (
        Theirs(),
        "gamma lam norm_adv_by_std_in_grpo use_kl_in_reward kl_penalty kl_ctrl.type "
        "kl_ctrl.kl_coef kl_ctrl.horizon kl_ctrl.target_kl gdpo_reward_keys gdpo_reward_weights",
    ),
    (
        Theirs(),
        "filter_groups.enable filter_groups.metric filter_groups.max_num_gen_batches "
        "filter_groups.max_inflight_gen_batches",
    ),
    (
        Mapped("verl's own weights multiply the policy term; its bypass needs rollout logprobs"),
        "rollout_correction.rollout_is rollout_correction.rollout_is_threshold "
        "rollout_correction.rollout_is_batch_normalize rollout_correction.rollout_rs "
        "rollout_correction.rollout_rs_threshold rollout_correction.bypass_mode",
    ),
    (
        Only(
            ("ppo_clip",),
            f"{_V1}; it belongs under actor_rollout_ref.actor.policy_loss.rollout_correction, "
            "with policy_loss.loss_mode=bypass_mode",
        ),
        "rollout_correction.loss_type",
    ),
    (CALLED, "rollout_correction._target_"),
    (Only((False,), _V1), "use_pf_ppo"),
    (Irrelevant("of use_pf_ppo, which is refused"), "pf_ppo.*"),
)

_TRAINER_KEYS = under(
    "trainer",
    (
        Theirs(),
        "total_epochs total_training_steps project_name experiment_name logger "
        "log_val_generations rollout_data_dir validation_data_dir resume_from_path "
        "checkpoint_callback_class val_before_train val_only test_freq critic_warmup "
        "default_local_dir remove_previous_ckpt_in_save",
    ),
    (Mapped("the server saves; a manifest under default_local_dir names it"), "save_freq"),
    (Mapped("the server loads what the manifest names"), "resume_mode"),
    (Mapped("by verl's own rule; the server's checkpoint goes too"), "max_actor_ckpt_to_keep"),
    (
        Irrelevant("nothing was copied here, as with a local path in verl"),
        "del_local_ckpt_after_load",
    ),
    (_NO_CRITIC, "max_critic_ckpt_to_keep"),
    (
        Irrelevant("verl's V1 trainer always balances; here one worker takes all rows"),
        "balance_batch",
    ),
    (Irrelevant("verl has no accelerator here; its worker runs on a CPU"), "device"),
    (UNREAD, "ray_wait_register_center_timeout"),
    (Only((0,), _V1), "esi_redundant_time"),
    (Only((1,), REMOTE_LAYOUT + "; one worker forwards to it"), "n_gpus_per_node nnodes"),
    (Only((None,), "checkpoints stay in the server's checkpoint_dir"), "default_hdfs_dir"),
    (Only((True,), "the older trainer has no hooks for another engine"), "use_v1"),
    (
        Only((NAME, ASYNC_NAME), "these are the shim's modes of verl's V1 trainer"),
        "v1.trainer_mode",
    ),
    (_OTHER_MODE, "v1.colocate_async.num_warmup_batches"),
    (Theirs(), "v1.sync.*"),
    (
        Theirs(),
        "v1.sampler.max_off_policy_threshold v1.sampler.max_off_policy_strategy "
        "v1.sampler.sync_refill_failed_groups v1.sampler.custom_sampler.path "
        "v1.sampler.custom_sampler.name v1.sampler.sampler_kwargs",
    ),
)

_SEPARATE_KEYS = under(
    _SEPARATE,
    (by_mode(sync=_OTHER_MODE, separate_async=Theirs()), "num_warmup_batches parameter_sync_step"),
    (CALLED, "hybrid_rollout._target_"),
    (
        by_mode(
            sync=_OTHER_MODE,
            separate_async=Only((False,), "it lends verl's own idle accelerators to the rollout"),
        ),
        "hybrid_rollout.enable_switch",
    ),
    (
        Irrelevant("of hybrid_rollout.enable_switch, which is refused"),
        "hybrid_rollout.switch_threshold_ratio hybrid_rollout.adaptive_switch_threshold "
        "hybrid_rollout.switch_threshold_step_up hybrid_rollout.switch_threshold_step_down "
        "hybrid_rollout.switch_threshold_release_steps hybrid_rollout.switch_cost_window_size",
    ),
)

_DATA_KEYS = under(
    "data",
    (
        Theirs(),
        "use_shm train_files val_files train_max_samples val_max_samples prompt_key reward_fn_key "
        "train_batch_size gen_batch_size val_batch_size tool_config_path function_tool_path "
        "return_raw_chat return_full_prompt shuffle seed dataloader_num_workers "
        "validation_shuffle filter_overlong_prompts filter_overlong_prompts_workers truncation "
        "trust_remote_code custom_cls.path custom_cls.name apply_chat_template_kwargs",
    ),
    (Mapped("by way of rollout.prompt_length"), "max_prompt_length"),
    (Mapped("by way of rollout.response_length"), "max_response_length"),
    (
        Irrelevant("a row with images, video or audio is refused when it is generated"),
        "image_patch_size image_key video_key audio_key return_multi_modal_inputs",
    ),
    (
        Only(({},), "agent loops would send it, and remote_rl carries text alone"),
        "mm_processor_kwargs",
    ),
    (UNREAD, "tokenizer return_raw_input_ids"),
)

_OTHER_KEYS = joined(
    (("model_engine", Only(("dp",), "it chooses the sections whose keys the shim maps")),),
    under(
        "actor_rollout_ref",
        (
            by_mode(
                sync=Only((True,), "False belongs to the separate_async mode"),
                separate_async=Only((False,), "verl has no accelerators of its own here"),
            ),
            "hybrid_engine",
        ),
    ),
    under(
        "critic",
        (Not((True,), "a run holds one model, the policy; set it to False"), "enable"),
        (_NO_CRITIC, "*"),
    ),
    under(
        "distillation",
        (Only((False,), "its losses need more than logprobs and entropies"), "enabled"),
        (Irrelevant("of distillation.enabled, which is refused"), "*"),
    ),
    under(
        "global_profiler",
        (Only((None,), "the worker only forwards; profile the server"), "steps"),
        (Irrelevant("of global_profiler.steps, which is refused"), "*"),
    ),
    under(
        "reward",
        (
            Mapped("a reward model needs a pool of its own here: True wherever it is enabled"),
            "reward_model.enable_resource_pool",
        ),
        (Theirs(), "*"),
    ),
    # the older names of keys under reward, which verl moves there
    under("custom_reward_function", (Theirs(), "*")),
    under("reward_model", (Theirs(), "*")),
    under("sandbox_fusion", (Theirs(), "*")),
    under("transfer_queue", (Theirs(), "*")),
    under("skip", (Theirs(), "*")),
    under("ray_kwargs", (Theirs(), "*")),
).items()

TABLE: Mapping[str, Rule] = joined(
    _ALGORITHM_KEYS, _TRAINER_KEYS, _SEPARATE_KEYS, _DATA_KEYS, _OTHER_KEYS
)
