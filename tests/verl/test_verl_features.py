"""Stock verl's trainer with what real scripts combine, as users start it, against the mock behind
a real HTTP server whose call log says what arrived."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl_runs import Row, Trainings, connect_and_read
from verl_workload import (
    ANSWER,
    CALLS,
    END,
    HOPELESS,
    LETTERS,
    TOOL_VOCABULARY,
    VOCABULARY,
    build_inputs,
    build_parquet,
)

from remote_rl.testing import CallLog, MockServer
from remote_rl.types import Batch

Serve = Callable[..., MockServer]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
STEPS = 3

# -- one run with everything that a DAPO-like script sets ------------------------------------------

PROMPTS, SAMPLES = 4, 8
ROWS = PROMPTS * SAMPLES
EPOCHS, SEED = 2, 7
UPDATES = 2 * EPOCHS  # of a step: two mini-batches, twice
TOP_K, CLIPPED, KEPT = 8, 0.75, 0.68
VALIDATED, VALIDATION_SAMPLES = 3, 2

COMBINED = (
    f"{ROLLOUT}.n={SAMPLES}",
    f"{ROLLOUT}.temperature=0.7",
    f"{ROLLOUT}.top_k={TOP_K}",
    f"{ACTOR}.ppo_epochs={EPOCHS}",
    f"{ACTOR}.data_loader_seed={SEED}",
    f"{ACTOR}.use_dynamic_bsz=false",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
    f"{ACTOR}.entropy_coeff=0.01",
    f"{ACTOR}.use_kl_loss=false",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.kl_coef=0.05",
    # the truncated rollout's probabilities are larger than the policy's: weights are below 1, are
    # cut off at CLIPPED, and their tokens are rejected below KEPT
    "algorithm.rollout_correction.rollout_is=token",
    f"algorithm.rollout_correction.rollout_is_threshold={CLIPPED}",
    "algorithm.rollout_correction.rollout_rs=token_k1",
    f"algorithm.rollout_correction.rollout_rs_threshold='0.5_{1 / KEPT}'",
    # DAPO: its filter is of verl's own replay buffer
    "trainer.v1.sampler.custom_sampler.path=null",
    "trainer.v1.sampler.custom_sampler.name=null",
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.metric=reward",
    f"{ACTOR}.clip_ratio_low=0.2",
    f"{ACTOR}.clip_ratio_high=0.28",
    f"{ACTOR}.loss_agg_mode=token-mean",
    "data.shuffle=false",
    # validation, with sampling parameters of its own
    "trainer.val_before_train=true",
    "trainer.test_freq=2",
    f"data.val_max_samples={VALIDATED}",
    f"{ROLLOUT}.val_kwargs.do_sample=true",
    f"{ROLLOUT}.val_kwargs.temperature=0.4",
    f"{ROLLOUT}.val_kwargs.top_p=0.9",
    f"{ROLLOUT}.val_kwargs.top_k=5",
    f"{ROLLOUT}.val_kwargs.n={VALIDATION_SAMPLES}",
    "trainer.save_freq=-1",
)


def test_what_real_scripts_combine(
    train: Trainings, tmp_path: Path, remote_rl_serve: Serve, remote_rl_calls: CallLog
) -> None:
    data = build_parquet(tmp_path / "letters.parquet", hopeless_every=4)
    server = remote_rl_serve(vocab_size=len(VOCABULARY), initial_scale=1.0)
    files = (f"data.train_files={data}", f"data.val_files={data}")
    done, rows = train(server.url, *COMBINED, *files, steps=STEPS)
    assert done.returncode == 0, done.stdout[-8000:]
    assert remote_rl_calls.failed == []
    # the first row is of the validation before the training
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    check_sampling(remote_rl_calls, [row["data"] for row in rows])
    steps = list(steps_of(remote_rl_calls))
    assert len(steps) == STEPS
    for (forward, updates), row in zip(steps, rows[1:], strict=True):
        check_mini_batches(forward, updates)
        check_losses(updates, row)
        check_correction(updates, row)
        check_groups(forward)
        check_metrics(updates, row)
    # the second epoch of mini-batches went far enough to be clipped
    assert rows[1]["data"]["actor/pg_clipfrac"] > 0
    penalties = [row["data"]["actor/reward_kl_penalty"] for row in rows[1:]]
    assert abs(penalties[0]) < 1e-6 < abs(penalties[-1])  # the policy began as the reference
    check_versions(server.url, remote_rl_calls, UPDATES * STEPS)


def check_sampling(calls: CallLog, logged: list[dict[str, Any]]) -> None:
    """Training and validation drew with their own parameters, as often as they should."""
    drawn = [request.params for request in calls.requests("generate")]
    training = [params for params in drawn if params.temperature == 0.7]
    validation = [params for params in drawn if params.temperature == 0.4]
    assert len(training) + len(validation) == len(drawn)
    assert {(each.top_p, each.top_k) for each in training} == {(1.0, TOP_K)}
    assert {(each.top_p, each.top_k) for each in validation} == {(0.9, 5)}
    # before the training, after step 2, and after the last one
    measured = ["val-core/letters/acc/mean@2" in row for row in logged]
    assert measured == [True, False, True, True]
    assert len(validation) == 3 * VALIDATED * VALIDATION_SAMPLES
    # each group that the filter dropped was drawn, and so was each that was drawn in its place
    groups = sum(
        PROMPTS
        + row.get("training/filter_groups/evicted_samples", 0)
        + row.get("training/filter_groups/discarded_surplus_samples", 0)
        for row in logged[1:]
    )
    assert groups > STEPS * PROMPTS
    assert len(training) == groups * SAMPLES


def steps_of(calls: CallLog) -> Iterator[tuple[Batch, list[Any]]]:
    """Of each step: the rows that old logprobs were computed of, and the `forward_backward`s."""
    found: list[tuple[Batch, list[Any]]] = []
    for call in calls:
        if call.event != "ended":
            continue
        if call.operation == "forward" and call.request.policy == "current":
            found.append((call.request.batch, []))
        elif call.operation == "forward_backward":
            found[-1][1].append(call.request)
    yield from found


def rows_of(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """Prompt and response of each row."""
    prompts = [batch.prompts[int(index)].tolist() for index in batch.prompt_index]
    return list(zip(prompts, batch.responses.to_rows(), strict=True))


def check_mini_batches(forward: Batch, updates: list[Any]) -> None:
    """Each epoch saw every row once, in the order that verl's iterator draws from the seed."""
    numbers = TensorDict({"row": torch.arange(ROWS)}, batch_size=[ROWS])
    iterator = tensordict_utils.make_iterator(
        numbers,
        mini_batch_size=ROWS // 2,
        epochs=EPOCHS,
        seed=SEED,
        dataloader_kwargs={"shuffle": True},
    )
    rows = rows_of(forward)
    expected = [[rows[number] for number in cut["row"].tolist()] for cut in iterator]
    assert [rows_of(update.batch) for update in updates] == expected
    assert expected[:2] != expected[2:]  # the epochs are shuffled, and differently


def check_losses(updates: list[Any], row: Row) -> None:
    """The loss is the one that was configured, and its denominator that of verl."""
    for update in updates:
        batch, loss = update.batch, update.loss
        assert type(loss).__name__ == "PPO"
        assert (loss.clip_low, loss.clip_high) == (0.2, 0.28)
        assert loss.aggregation.kind == "token_mean"
        # rejected tokens leave the loss, not verl's denominator
        assert loss.aggregation.denominator == len(batch.responses.values)
        assert loss.entropy.coef == 0.01
        assert loss.kl is None  # it is in the reward
        np.testing.assert_allclose(batch.temperature, 0.7, rtol=1e-6)
    assert row["data"]["actor/reward_kl_penalty_coeff"] == 0.05


def check_correction(updates: list[Any], row: Row) -> None:
    """A token's weight is the probability that the truncation left of the policy's own; weights
    are cut off above, and tokens with small ones are rejected."""
    for update in updates:
        weights = update.batch.importance_weights.values
        mask = update.batch.mask.values.astype(bool)
        assert weights.min() >= TOP_K / len(VOCABULARY)
        assert weights.max() <= CLIPPED + 1e-6
        near = np.abs(weights - KEPT) < 1e-5
        np.testing.assert_array_equal(mask[~near], (weights >= KEPT)[~near])
    first_epoch = Batch.concat([update.batch for update in updates[:2]])
    assert first_epoch.importance_weights is not None
    assert first_epoch.importance_weights.values.max() == pytest.approx(CLIPPED)
    kept = first_epoch.mask.values.mean()
    assert 0 < kept < 1
    rejected = row["data"]["rollout_corr/rollout_rs_masked_fraction"]
    assert rejected == pytest.approx(1 - kept, abs=1e-6)


def check_groups(forward: Batch) -> None:
    """Only groups whose rewards differ were trained on, and as many as there should be."""
    groups: dict[str, list[float]] = {}
    for prompt, response in rows_of(forward):
        words = [VOCABULARY[token] for token in prompt]
        wanted = VOCABULARY.index(words[-1])
        groups.setdefault(" ".join(words), []).append(response.count(wanted) / len(response))
    assert HOPELESS not in groups
    assert sum(map(len, groups.values())) == ROWS
    for rewards in groups.values():
        assert len(rewards) % SAMPLES == 0
        assert len(set(rewards)) > 1


def check_metrics(updates: list[Any], row: Row) -> None:
    """What every step must show, whatever is configured."""
    data = row["data"]
    assert all(math.isfinite(value) for value in data.values() if isinstance(value, float))
    counted = [sum(mask.any() for mask in update.batch.mask) for update in updates]
    assert data["actor/sequences"] == pytest.approx(np.mean(counted))
    assert data["actor/grad_norm"] > 0
    assert data["actor/entropy"] > 0
    assert data["actor/lr"] == pytest.approx(0.01)
    assert data["training/off_policy/trajectory_staleness/max"] == 0


def check_versions(url: str, calls: CallLog, updates: int) -> None:
    """Each update was one optimizer step, and the last weights reached the sampler."""
    assert calls.count("optim_step") == updates
    versions = connect_and_read(url)
    assert versions.trainer == versions.sampler == updates
    assert versions.label == STEPS


# -- several turns, with a tool -------------------------------------------------------------------

TOOL_ROWS = 8
ANSWER_ID, END_ID = TOOL_VOCABULARY.index(ANSWER), TOOL_VOCABULARY.index(END)

SEVERAL_TURNS = (
    "algorithm.adv_estimator=reinforce_plus_plus",
    f"{ROLLOUT}.n=1",
    f"data.train_batch_size={TOOL_ROWS}",
    f"{ACTOR}.ppo_mini_batch_size={TOOL_ROWS // 2}",
    f"{ACTOR}.use_dynamic_bsz=true",
    f"{ACTOR}.ppo_max_token_len_per_gpu=64",
    "data.max_response_length=24",
    f"{ROLLOUT}.agent.default_agent_loop=tool_agent",
    f"{ROLLOUT}.multi_turn.enable=true",
    f"{ROLLOUT}.multi_turn.format=hermes",
    f"{ROLLOUT}.multi_turn.max_assistant_turns=3",
    f"{ROLLOUT}.multi_turn.max_parallel_calls=2",
    "trainer.save_freq=-1",
)


def test_an_agent_that_calls_a_tool(
    tmp_path: Path, remote_rl_serve: Serve, remote_rl_calls: CallLog
) -> None:
    inputs = build_inputs(tmp_path, TOOL_VOCABULARY)
    server = remote_rl_serve(vocab_size=len(TOOL_VOCABULARY))
    tools = f"{ROLLOUT}.multi_turn.function_tool_path={inputs['tools']}"
    with closing(Trainings(inputs, tmp_path)) as train:
        done, rows = train(server.url, *SEVERAL_TURNS, tools, steps=STEPS)
    assert done.returncode == 0, done.stdout[-8000:]
    assert remote_rl_calls.failed == []
    assert [row["step"] for row in rows] == [1, 2, 3]
    steps = list(steps_of(remote_rl_calls))
    assert len(steps) == STEPS
    asked = {
        tuple(prompt.tolist())
        for request in remote_rl_calls.requests("generate")
        for prompt in request.prompts
    }
    answered = 0
    for (forward, updates), row in zip(steps, rows, strict=True):
        assert [len(update.batch) for update in updates] == [TOOL_ROWS // 2] * 2
        for update in updates:
            answered += check_turns(update.batch, asked)
            assert update.loss.aggregation.denominator == update.batch.mask.values.sum()
        assert len(forward) == TOOL_ROWS
        # of the tokens that the policy drew; the tool's are not among them
        assert row["data"]["training/rollout_probs_diff_valid"] == 1
        assert row["data"]["training/rollout_probs_diff_max"] <= 1e-6
        assert row["data"]["actor/grad_norm"] > 0
    assert answered > 0
    assert max(row["data"]["training/num_turns/max"] for row in rows) >= 4
    check_versions(server.url, remote_rl_calls, 2 * STEPS)


def check_turns(batch: Batch, asked: set[tuple[int, ...]]) -> int:
    """What of the responses is not the policy's is the tool's answer to its calls, and the policy
    was asked to go on behind it; how many answers there are."""
    answered = 0
    for (prompt, response), mask in zip(rows_of(batch), batch.mask.to_rows(), strict=True):
        turn_begins = place = 0
        while place < len(response):
            if mask[place]:
                place += 1
                continue
            answers = answers_to(response[turn_begins:place])
            assert answers, "a token is masked, and the turn before it called no tool"
            assert response[place : place + len(answers)] == answers
            assert mask[place : place + len(answers)] == [0] * len(answers)
            turn_begins = place = place + len(answers)
            assert tuple(prompt + response[:place]) in asked
            answered += len(answers) // 2
    return answered


def answers_to(turn: list[int]) -> list[int]:
    """What the tool answers to the first two calls of a turn, as token ids."""
    words = [TOOL_VOCABULARY[token] for token in turn]
    assert words[-1] == END
    called = [CALLS[word] for word in words if word in CALLS][:2]
    following = [LETTERS[LETTERS.index(letter) + 1] for letter in called]
    return [token for letter in following for token in (ANSWER_ID, TOOL_VOCABULARY.index(letter))]
