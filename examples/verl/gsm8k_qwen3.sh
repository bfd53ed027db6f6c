#!/usr/bin/env bash
# GSM8K with Qwen3-1.7B: GRPO, 8 answers to each problem, rewarded by verl's own rule.
#
# Needs GPUs, and has not been run anywhere yet: its keys are checked in the tests, its numbers are
# what is usual. Beside the model, in the server's environment:
#   remote-rl serve arctic --config examples/verl/gsm8k_qwen3.toml --checkpoint-dir checkpoints
# and in verl's, on a machine without an accelerator if you like:
#   MODEL=/models/Qwen3-1.7B DATA=gsm8k URL=http://127.0.0.1:7700 examples/verl/gsm8k_qwen3.sh
# DATA holds train.parquet and test.parquet of prepare_gsm8k.py. Of MODEL only tokenizer and
# config.json are read. Further arguments are verl's, and win.
set -euo pipefail

: "${MODEL:?the directory of the model that the server serves}"
: "${DATA:?the folder with train.parquet and test.parquet that prepare_gsm8k.py wrote}"
URL=${URL:-http://127.0.0.1:7700}

exec python -m verl.trainer.main_ppo \
    trainer.v1.trainer_mode=remote_rl \
    actor_rollout_ref.rollout.name=remote_rl \
    "+actor_rollout_ref.rollout.engine_kwargs.remote_rl.url=$URL" \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    trainer.n_gpus_per_node=1 \
    trainer.nnodes=1 \
    "actor_rollout_ref.model.path=$MODEL" \
    "data.train_files=$DATA/train.parquet" \
    "data.val_files=$DATA/test.parquet" \
    data.train_batch_size=256 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    data.filter_overlong_prompts=true \
    +data.apply_chat_template_kwargs.enable_thinking=false \
    algorithm.adv_estimator=grpo \
    critic.enable=false \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.use_kl_loss=true \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    trainer.logger=console \
    trainer.project_name=remote_rl \
    trainer.experiment_name=gsm8k_qwen3 \
    trainer.total_epochs=5 \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    "$@"
