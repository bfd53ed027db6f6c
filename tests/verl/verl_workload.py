"""Inputs of a small verl training, built from scratch: tokenizer, model config, parquet, reward.

Imports tokenizers, transformers and pyarrow (verl's environment) inside the functions that need
them; the command line that `main_ppo` is started with is here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tiny_model
from tiny_model import END, PADDING

LETTERS = "abcdefghijklmnopqrstuvwxyz"
#: ids 0..: padding, the end of a response, and letters
VOCABULARY = [PADDING, END, *LETTERS]
#: a prompt of two letters that no other row has
HOPELESS = "z z"
#: of the training with a tool: few letters, calls of the tool, each of them one token, and the word
#: that its answers begin with
ANSWER = "<answer>"
CALLS = {
    f'<tool_call>{{"name":"next_letter","arguments":{{"letter":"{letter}"}}}}</tool_call>': letter
    for letter in "abc"
}
TOOL_VOCABULARY = [PADDING, END, *LETTERS[:5], ANSWER, *CALLS]

_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"

_REWARD = '''
"""Reward of the tests: the share of the response's tokens that are the asked letter."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    words = solution_str.split()
    return sum(word == ground_truth for word in words) / max(len(words), 1)
'''

_SAMPLER = '''
"""verl's replay buffer, asked more often than every two seconds."""

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync


class QuickReplayBuffer(ReplayBuffer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, poll_interval=0.05, **kwargs)


class QuickReplayBufferAsync(ReplayBufferAsync):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, poll_interval=0.05, **kwargs)
'''

_TOOLS = f'''
"""The tool of the tests."""

from verl.tools.function_tool import function_tool


@function_tool
def next_letter(letter: str) -> str:
    """The letter that follows.

    Args:
        letter: any but the last.
    """
    return "{ANSWER} " + chr(ord(letter) + 1)
'''


def build_model_folder(folder: Path, vocabulary: Sequence[str] = VOCABULARY) -> Path:
    """A word-level tokenizer with a chat template and the config of a tiny model; no weights."""
    return tiny_model.build_model_folder(folder, vocabulary, _TEMPLATE)


def build_parquet(path: Path, rows: int = 16, *, hopeless_every: int | None = None) -> Path:
    """Prompts of two letters each; the reward wants the second. hopeless_every: each so many rows
    one whose prompt is HOPELESS, and for which no response gets a reward."""
    import pyarrow
    import pyarrow.parquet

    records = []
    for index in range(rows):
        first, wanted = LETTERS[index % 5], LETTERS[index % 3]
        content = f"{first} {wanted}"
        if hopeless_every is not None and index % hopeless_every == 0:
            content, wanted = HOPELESS, "no letter"
        records.append(
            {
                "data_source": "letters",
                "prompt": [{"role": "user", "content": content}],
                "reward_model": {"style": "rule", "ground_truth": wanted},
                "extra_info": {"index": index},
            }
        )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


def written_inputs(folder: Path) -> dict[str, Path]:
    """Where everything lies that `build_inputs` wrote to `folder`."""
    return {
        "model": folder / "model",
        "data": folder / "letters.parquet",
        "reward": folder / "letter_reward.py",
        "sampler": folder / "quick_sampler.py",
        "tools": folder / "letter_tools.py",
        "checkpoints": folder / "checkpoints",
        "metrics": folder / "metrics.jsonl",
    }


def build_inputs(folder: Path, vocabulary: Sequence[str] = VOCABULARY) -> dict[str, Path]:
    """Everything the command line names, under `folder`."""
    inputs = written_inputs(folder)
    build_model_folder(inputs["model"], vocabulary)
    build_parquet(inputs["data"])
    inputs["reward"].write_text(_REWARD, encoding="utf-8")
    inputs["sampler"].write_text(_SAMPLER, encoding="utf-8")
    inputs["tools"].write_text(_TOOLS, encoding="utf-8")
    return inputs


def overrides(inputs: dict[str, Path], url: str, *, steps: int) -> list[str]:
    """Arguments of `python -m verl.trainer.main_ppo`: synchronous GRPO, two mini-batches a step,
    KL to the reference, a custom reward function."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        "trainer.v1.trainer_mode=remote_rl",
        f"{rollout}.name=remote_rl",
        f"+{rollout}.engine_kwargs.remote_rl.url={url}",
        f"actor_rollout_ref.model.path={inputs['model']}",
        f"data.train_files={inputs['data']}",
        f"data.val_files={inputs['data']}",
        "data.train_batch_size=4",
        "data.max_prompt_length=8",
        "data.max_response_length=6",
        "data.dataloader_num_workers=0",
        "algorithm.adv_estimator=grpo",
        f"{actor}.ppo_mini_batch_size=2",
        f"{actor}.use_dynamic_bsz=true",
        f"{actor}.use_kl_loss=true",
        f"{actor}.kl_loss_coef=0.01",
        f"{actor}.entropy_coeff=0.001",
        f"{actor}.optim.lr=0.01",
        f"{actor}.shuffle=true",
        f"{rollout}.n=4",
        f"{rollout}.temperature=0.9",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.agent.num_workers=1",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={inputs['reward']}",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=100",
        "trainer.logger=[console,file]",
        "trainer.project_name=remote_rl",
        "trainer.experiment_name=letters",
        f"trainer.default_local_dir={inputs['checkpoints']}",
        "trainer.save_freq=1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        f"trainer.v1.sampler.custom_sampler.path={inputs['sampler']}",
        "trainer.v1.sampler.custom_sampler.name=QuickReplayBuffer",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "ray_kwargs.ray_init.num_cpus=8",
        "+ray_kwargs.ray_init.include_dashboard=false",
    ]


def asynchronous() -> list[str]:
    """Further arguments, after those of `overrides`: two updates between two deliveries of weights,
    and responses long enough to be drawn across them."""
    rollout, section = "actor_rollout_ref.rollout", "trainer.v1.separate_async"
    return [
        "trainer.v1.trainer_mode=remote_rl_separate_async",
        f"{section}.parameter_sync_step=2",
        f"{section}.num_warmup_batches=1",
        "actor_rollout_ref.hybrid_engine=false",
        f"{rollout}.nnodes=1",
        f"{rollout}.n_gpus_per_node=1",
        f"{rollout}.checkpoint_engine.backend=remote_rl",
        "data.max_response_length=24",
        "trainer.v1.sampler.custom_sampler.name=QuickReplayBufferAsync",
    ]
