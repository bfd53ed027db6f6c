#!/usr/bin/env bash
# BIRD text-to-SQL: GRPO, 8 queries to each question, rewarded by what they return (bird_reward.py).
#
# Needs GPUs, and has not been run anywhere yet: its keys are checked in the tests, its numbers are
# what is usual. Beside the model, in the server's environment:
#   remote-rl serve arctic --config examples/verl/bird_text_to_sql.toml --checkpoint-dir checkpoints
# and in verl's, on a machine without an accelerator if you like:
#   MODEL=/models/Qwen3-1.7B DATA=bird URL=http://127.0.0.1:7700 examples/verl/bird_text_to_sql.sh
# DATA holds train.parquet and dev.parquet of prepare_bird.py, whose rows name the databases: these
# must lie under the same paths where verl's reward workers run. Of MODEL only tokenizer and
# config.json are read. Further arguments are verl's, and win.
set -euo pipefail

: "${MODEL:?the directory of the model that the server serves}"
: "${DATA:?the folder with train.parquet and dev.parquet that prepare_bird.py wrote}"
URL=${URL:-http://127.0.0.1:7700}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

exec python -m verl.trainer.main_ppo \
    trainer.v1.trainer_mode=remote_rl \
    actor_rollout_ref.rollout.name=remote_rl \
    "+actor_rollout_ref.rollout.engine_kwargs.remote_rl.url=$URL" \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    trainer.n_gpus_per_node=1 \
    trainer.nnodes=1 \
    "actor_rollout_ref.model.path=$MODEL" \
    "data.train_files=$DATA/train.parquet" \
    "data.val_files=$DATA/dev.parquet" \
    data.train_batch_size=128 \
    data.max_prompt_length=6144 \
    data.max_response_length=2048 \
    data.filter_overlong_prompts=true \
    +data.apply_chat_template_kwargs.enable_thinking=false \
    "reward.custom_reward_function.path=$HERE/bird_reward.py" \
    reward.custom_reward_function.name=compute_score \
    +reward.custom_reward_function.reward_kwargs.seconds=5 \
    algorithm.adv_estimator=grpo \
    critic.enable=false \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.use_kl_loss=true \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    trainer.logger=console \
    trainer.project_name=remote_rl \
    trainer.experiment_name=bird_text_to_sql \
    trainer.total_epochs=3 \
    trainer.save_freq=20 \
    trainer.test_freq=10 \
    "$@"
