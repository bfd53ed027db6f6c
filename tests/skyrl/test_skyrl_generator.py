"""SkyRL's own generator and environments over RemoteSampler: turns, sessions, and failures, which
never become a reward."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_vllm_sampling_params
from skyrl.train.config import SamplingParams, SkyRLTrainConfig
from skyrl.train.generators.base import GeneratorOutput, TrajectoryID
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl_workload import ANSWER, END, NUMBERS, VOCABULARY, build_model_folder
from transformers import AutoTokenizer

from remote_rl import AdamW, Batch, Session, errors, losses
from remote_rl.testing import fault
from shims.skyrl.sampler import RemoteSampler

MODEL = "the-policy"
ROWS = 6
SMALL = {"vocab_size": len(VOCABULARY), "eos_token_ids": (VOCABULARY.index(END),)}

Generate = Callable[..., GeneratorOutput]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("model")
    return AutoTokenizer.from_pretrained(build_model_folder(folder))


@pytest.fixture
def generate(tokenizer: Any) -> Generate:
    """`generate(session, env_class, attempts=, rows=, **settings of the generator)`."""

    def run(
        session: Session, env_class: str, attempts: int = 1, rows: int = ROWS, **given: Any
    ) -> GeneratorOutput:
        config = SkyRLTrainConfig()
        generator = config.generator
        generator.sampling_params.max_generate_length = 4
        generator.max_input_length = 64
        for name, value in given.items():
            setattr(generator, name, value)
        sampler = RemoteSampler(
            session, tokenizer, model_name=MODEL, info=session.info().result(), attempts=attempts
        )
        own = SkyRLGymGenerator(
            generator, config.environment.skyrl_gym, sampler, tokenizer, policy_model_name=MODEL
        )
        batch = {
            "prompts": [[{"role": "user", "content": NUMBERS[row % 2]}] for row in range(rows)],
            "env_classes": [env_class] * rows,
            "env_extras": [
                {"reward_spec": {"ground_truth": NUMBERS[row % 2]}, "extra_info": {}}
                for row in range(rows)
            ],
            "sampling_params": get_vllm_sampling_params(generator.sampling_params),
            "trajectory_ids": [TrajectoryID(f"row{row}", 0) for row in range(rows)],
        }
        return asyncio.run(asyncio.wait_for(own.generate(batch, disable_tqdm=True), 60))

    return run


def test_one_turn(
    generate: Generate, remote_rl_connect: Any, remote_rl_calls: Any, tokenizer: Any
) -> None:
    output = generate(remote_rl_connect(**SMALL), "gsm8k")
    assert [len(rewards) for rewards in output["rewards"]] == [
        len(ids) for ids in output["response_ids"]
    ]
    for ids, logprobs, mask in zip(
        output["response_ids"], output["rollout_logprobs"], output["loss_masks"], strict=True
    ):
        assert 1 <= len(ids) == len(logprobs) == len(mask) <= 4
        assert set(mask) == {1}
    sessions = {f"row{row}_0" for row in range(ROWS)}
    asked = [each.params for each in remote_rl_calls.requests("generate")]
    assert {each.session_id for each in asked} == sessions
    assert {each.cache_salt for each in asked} == {f"{MODEL}:0"}
    ended = [each.session_id for each in remote_rl_calls.requests("finish_session")]
    assert sorted(ended) == sorted(sessions)


def test_a_right_answer_is_rewarded(generate: Generate, remote_rl_connect: Any) -> None:
    """So that a reward of 0 elsewhere is the environment's own."""
    session = remote_rl_connect(**SMALL)
    answers = Batch(
        prompts=[_ids(number, "say") for number in NUMBERS[:2]],
        prompt_index=[0, 1],
        responses=[_ids(ANSWER, number, END) for number in NUMBERS[:2]],
        temperature=1.0,
    )
    for _ in range(40):
        session.training.forward_backward(answers, losses.CrossEntropy()).result()
        session.training.optim_step(AdamW(lr=0.05)).result()
    session.weights.sync().result()
    greedy = SamplingParams(max_generate_length=4, temperature=0.0)
    output = generate(session, "gsm8k", sampling_params=greedy)
    assert [sum(rewards) for rewards in output["rewards"]] == [1.0] * ROWS
    assert output["stop_reasons"] == ["stop"] * ROWS


def _ids(*words: str) -> list[int]:
    return [VOCABULARY.index(word) for word in words]


def test_turns_go_on_from_the_tokens_drawn(
    generate: Generate, remote_rl_connect: Any, remote_rl_calls: Any
) -> None:
    output = generate(remote_rl_connect(**SMALL), "gsm8k_multi_turn", max_turns=2)
    turns: dict[str, list[list[int]]] = {}
    for each in remote_rl_calls.requests("generate"):
        turns.setdefault(each.params.session_id, []).append(each.prompts[0].tolist())
    for row in range(ROWS):
        first, second = sorted(turns[f"row{row}_0"], key=len)
        prompt, response = output["prompt_token_ids"][row], output["response_ids"][row]
        assert prompt == first
        assert (prompt + response)[: len(second)] == second
        assert 0 in output["loss_masks"][row], "the environment's own tokens"
    assert output["rollout_metrics"]["environment/avg_steps"] == 2.0


@pytest.mark.parametrize(
    ("env_class", "call", "given"),
    [
        ("gsm8k", ROWS, {}),
        ("gsm8k", ROWS, {"batched": True}),
        ("gsm8k_multi_turn", ROWS + 1, {"max_turns": 2}),
    ],
)
def test_a_failed_generation_ends_the_rollout(
    generate: Generate, remote_rl_connect: Any, env_class: str, call: int, given: dict[str, Any]
) -> None:
    """Of one trajectory's one turn; nothing is returned, so nothing is rewarded."""
    session = remote_rl_connect(**SMALL, faults=[fault("generate", call=call)])
    with pytest.raises(errors.BackendError, match="a fault that the options"):
        generate(session, env_class, **given)


def test_it_is_not_hidden_by_a_session_that_cannot_be_ended(
    generate: Generate, remote_rl_connect: Any
) -> None:
    broken = RuntimeError("the engine broke")
    session = remote_rl_connect(
        **SMALL, faults=[fault("generate", error=broken), fault("finish_session")]
    )
    with pytest.raises(errors.BackendError, match="the engine broke"):
        generate(session, "gsm8k", rows=1)


def test_an_engines_failure_that_passes_costs_nothing(
    generate: Generate, remote_rl_connect: Any, remote_rl_calls: Any
) -> None:
    session = remote_rl_connect(**SMALL, faults=[fault("generate", call=2)])
    output = generate(session, "gsm8k", attempts=2)
    assert len(output["rewards"]) == ROWS
    assert remote_rl_calls.failed == ["generate"]


def test_a_lost_run_ends_the_rollout(generate: Generate, remote_rl_connect: Any) -> None:
    session = remote_rl_connect(**SMALL, faults=[fault("generate", error="RunLostError")])
    with pytest.raises(errors.RunLostError):
        generate(session, "gsm8k", attempts=3, rows=1)
