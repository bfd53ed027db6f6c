"""What the existing Arctic integration of SkyRL gets wrong, each shown to be right here, on a mock.

Losses and the optimizer are compared with SkyRL's own functions elsewhere (test_skyrl_parity.py,
test_skyrl_dispatch.py), whole trainings run in test_skyrl_training.py; here, that nothing gets lost
between SkyRL's trainer and the run."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import skyrl_gym
import torch
from safetensors.numpy import load_file
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.utils.ppo_utils import (
    apply_loss_reduction_to_advantages_minibatch,
)
from skyrl.train.generators.base import GeneratorOutput
from skyrl_entry import LookingEnv
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.envs.registration import deregister
from skyrl_in_process import (
    Training,
    by_hand,
    rows_of_requests,
    tokens_of,
    training,
)
from skyrl_workload import VOCABULARY as WORDS
from skyrl_workload import build_data, build_inputs

from remote_rl import errors, losses
from remote_rl.testing import fault
from shims.common.checkpoints import MANIFEST
from shims.skyrl.sampler import RemoteSampler

ALGORITHM, OPTIMIZER = "trainer.algorithm", "trainer.policy.optimizer_config"
TEMPERATURE = 0.7
AT_TEMPERATURE = f"generator.sampling_params.temperature={TEMPERATURE}"
#: prompts and samples of each in a step of the tests' training, and its mini-batches
ROWS, MINI_BATCHES = 16, 2

# torch's own data loader calls what torch has deprecated
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

Start = Callable[..., Training]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder: Path = tmp_path_factory.mktemp("inputs")
    return {**build_inputs(folder), "broken": build_data(folder / "broken.jsonl", "broken")}


@pytest.fixture
def start(inputs: dict[str, Path], tmp_path: Path) -> Iterator[Start]:
    """`start(*overrides, data=, **options of the mock)`."""
    with ExitStack() as opened:
        yield lambda *more, **options: opened.enter_context(
            training(inputs, tmp_path, *more, **options)
        )


class BrokenEnv(BaseTextEnv):
    """Scores nothing, and the first of all that share `steps` fails."""

    def __init__(self, steps: Iterator[int]) -> None:
        super().__init__()
        self._steps = steps

    def step(self, action: str) -> BaseTextEnvStepOutput:
        if next(self._steps) == 0:
            raise ValueError("no score for that")
        return BaseTextEnvStepOutput(observations=[], reward=0.0, done=True, metadata={})


@pytest.fixture(autouse=True)
def environments() -> Iterator[None]:
    steps = itertools.count()
    skyrl_gym.register(id="looking", entry_point=LookingEnv)
    skyrl_gym.register(id="broken", entry_point=lambda **_: BrokenEnv(steps))
    yield
    for name in ("looking", "broken"):
        deregister(name)


# -- a step ends on SkyRL 0.4.0 -----------------------------------------------------------------


def test_get_timing_metrics_is_there_so_a_step_ends(start: Start) -> None:
    run = start("trainer.max_training_steps=1")
    run.trainer.global_step = 0
    asyncio.run(run.trainer.train())
    ((step, logged),) = run.rows.logged
    assert step == 1
    assert logged["timing/sync_weights_only_transfer"] >= 0
    assert run.calls.count("optim_step") == MINI_BATCHES


# -- names of the configuration -----------------------------------------------------------------


def sent_losses(run: Training) -> list[Any]:
    run.update(run.rollouts())
    return [request.loss for request in run.sent()]


def test_clip_values_are_the_configurations(start: Start) -> None:
    run = start(f"{ALGORITHM}.eps_clip_low=0.1", f"{ALGORITHM}.eps_clip_high=0.5")
    for loss in sent_losses(run):
        assert (loss.clip_low, loss.clip_high) == (0.1, 0.5)


def test_gspo_is_gspo(start: Start) -> None:
    for loss in sent_losses(start(f"{ALGORITHM}.policy_loss_type=gspo")):
        assert isinstance(loss, losses.PPO)
        assert loss.ratio == "sequence"


def test_the_entropy_bonus_is_the_configurations(start: Start) -> None:
    run = start(f"{ALGORITHM}.use_entropy_loss=true", f"{ALGORITHM}.entropy_loss_coef=0.25")
    assert [loss.entropy.coef for loss in sent_losses(run)] == [0.25] * MINI_BATCHES


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_the_reduction_of_the_loss_is_the_configurations(start: Start, reduction: str) -> None:
    """The advantages that are sent carry it, and the loss is a sum over them."""
    run = start(f"{ALGORITHM}.loss_reduction={reduction}")
    rows = by_length(run)
    run.update(rows)
    wanted = []
    for begin, end in rows.metadata["policy_mini_batch_boundaries"]:
        piece = rows[begin:end]
        piece["advantages"] = apply_loss_reduction_to_advantages_minibatch(
            piece["advantages"], piece["loss_mask"], reduction, micro_batch_size=1, max_seq_len=1
        )
        wanted += tokens_of(piece, "advantages")
    found = rows_of_requests(run.sent(), "advantages")
    assert found == [pytest.approx(each) for each in wanted]
    assert {request.loss.aggregation for request in run.sent()} == {losses.sum()}
    first = [abs(row[0]) for row in found]
    # the mean over tokens weighs every token of a mini-batch alike, that over sequences does not
    assert (len({round(each, 6) for each in first[: ROWS // 2]}) == 1) is (
        reduction == "token_mean"
    )


def by_length(run: Training) -> TrainingInputBatch:
    """Rows of several lengths."""
    prompts = [row // 4 for row in range(ROWS)]
    output = by_hand(
        [[8, 3 + prompt] for prompt in prompts],
        [[2 + row % 5] * (1 + row % 6) for row in range(ROWS)],
    )
    rows = run.rows_of(output, [str(prompt) for prompt in prompts])
    return run.scored(rows)


# -- the optimizer ------------------------------------------------------------------------------


def test_betas_decay_and_clipping_are_the_configurations(start: Start) -> None:
    run = start(
        f"{OPTIMIZER}.adam_betas=[0.8,0.97]",
        f"{OPTIMIZER}.weight_decay=0.3",
        f"{OPTIMIZER}.max_grad_norm=0.7",
    )
    run.update(run.rollouts())
    for request in run.calls.requests("optim_step"):
        adamw = request.optimizer
        assert (adamw.betas, adamw.weight_decay) == ((0.8, 0.97), 0.3)
        assert adamw.max_grad_norm == 0.7


def test_the_schedule_warms_up_and_ends_with_the_training(start: Start) -> None:
    """Two epochs of 2 steps of 2 mini-batches are 8 optimizer steps."""
    run = start(f"{OPTIMIZER}.scheduler=linear", f"{OPTIMIZER}.num_warmup_steps=2")
    rows = run.rollouts()
    for _ in range(4):
        run.update(rows)
    rates = [request.optimizer.lr for request in run.calls.requests("optim_step")]
    wanted = [0, 1 / 2, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]
    assert rates == pytest.approx([0.05 * each for each in wanted])


# -- mini-batches and epochs --------------------------------------------------------------------


def test_256_prompts_in_mini_batches_of_4_are_64_steps(start: Start) -> None:
    run = start(
        "trainer.train_batch_size=256",
        "trainer.policy_mini_batch_size=4",
        "generator.n_samples_per_prompt=1",
    )
    prompts = [[2 + row % 20, 2 + row // 20] for row in range(256)]
    responses = [[2 + row % 20] * (1 + row % 3) for row in range(256)]
    rows = run.rows_of(by_hand(prompts, responses), [str(row) for row in range(256)])
    run.update(run.scored(rows))
    assert [len(request.batch) for request in run.sent()] == [4] * 64
    assert run.calls.count("optim_step") == 64
    assert rows_of_requests(run.sent(), "responses") == responses


def test_a_batch_is_trained_on_more_than_once(start: Start) -> None:
    run = start("trainer.update_epochs_per_batch=3")
    run.update(run.rollouts())
    sent = [rows_of_requests([request], "responses") for request in run.sent()]
    assert sent[:2] * 3 == sent
    assert sent[0] != sent[1]
    assert run.calls.names("forward_backward", "optim_step") == [
        "forward_backward",
        "optim_step",
    ] * (3 * MINI_BATCHES)


def test_the_data_are_gone_through_more_than_once(start: Start) -> None:
    run = start("trainer.train_batch_size=8", "trainer.policy_mini_batch_size=8")
    run.trainer.global_step = 0
    asyncio.run(run.trainer.train())
    logged = [(step, data["trainer/epoch"]) for step, data in run.rows.logged]
    assert logged == [(1, 0), (2, 1)]
    assert run.session.weights.version().result().label == 2


# -- masks, logprobs, the reference -------------------------------------------------------------


def two_turns(start: Start, **options: Any) -> Training:
    """Trajectories with the environment's words between the turns."""
    return start(
        AT_TEMPERATURE,
        "environment.env_class=looking",
        "generator.max_turns=2",
        "generator.max_input_length=64",
        data="looking",
        **options,
    )


def test_the_loss_mask_stays_what_the_generator_said(start: Start) -> None:
    run = two_turns(start)
    rows = run.rollouts()
    run.update(rows)
    masks = rows_of_requests(run.sent(), "mask")
    assert masks == [[bool(each) for each in row] for row in tokens_of(rows, "loss_mask")]
    assert all(0 < sum(row) < len(row) for row in masks), "words of both sides in every row"


def test_old_logprobs_are_at_the_temperature_that_was_drawn_at(start: Start) -> None:
    run = start(AT_TEMPERATURE)
    rows = run.rollouts()
    drawn, old = (
        np.concatenate([row[1:] for row in tokens_of(rows, name)])
        for name in ("rollout_logprobs", "action_log_probs")
    )  # the first token is drawn without the ids that end a response, of which the trainer knows
    np.testing.assert_allclose(old, drawn, atol=1e-5)
    run.update(rows)
    assert all((each.batch.temperature == np.float32(TEMPERATURE)).all() for each in run.sent())
    assert rows_of_requests(run.sent(), "old_logprobs") == tokens_of(rows, "action_log_probs")
    temperatures = {
        request.policy: set(request.batch.temperature.tolist())
        for request in run.calls.requests("forward")
    }
    assert temperatures == {"current": {np.float32(TEMPERATURE)}, "reference": {1.0}}


def test_the_kl_loss_has_the_references_logprobs(start: Start) -> None:
    run = start(f"{ALGORITHM}.use_kl_loss=true", f"{ALGORITHM}.kl_loss_coef=0.03")
    first = run.rollouts()
    base = first["base_action_log_probs"]
    torch.testing.assert_close(first["action_log_probs"], base)  # it starts as the policy
    run.update(first)
    again = run.scored(first)
    assert torch.equal(again["base_action_log_probs"], base)  # and stays where it was
    assert (again["action_log_probs"] - base).abs().max() > 0.1
    run.calls.clear()
    assert run.update(again)["policy_kl"] > 1e-3
    assert rows_of_requests(run.sent(), "ref_logprobs") == tokens_of(again, "base_action_log_probs")
    assert {request.loss.kl.coef for request in run.sent()} == {0.03}


# -- checkpoints --------------------------------------------------------------------------------


def test_a_save_uses_its_path_and_a_load_brings_it_back(start: Start, tmp_path: Path) -> None:
    """By the path alone: the run's own weights, and a later checkpoint, are others."""
    saved = tmp_path / "ckpts" / "global_step_1"
    run = start("trainer.resume_mode=from_path", f"trainer.resume_path={saved}")
    rows = run.rollouts()
    run.update(rows)
    assert run.trainer.save_checkpoints() == str(saved)
    manifest = json.loads((saved / "policy" / MANIFEST).read_text(encoding="utf-8"))
    held, policy = manifest["checkpoint"], run.policy
    assert [each.name for each in run.session.training.checkpoints().result()] == [held]
    run.update(rows)
    moved = run.policy
    assert any((each != policy[name]).any() for name, each in moved.items())
    run.trainer.global_step = 2
    assert run.trainer.save_checkpoints() == str(tmp_path / "ckpts" / "global_step_2")

    step, folder = run.trainer.load_checkpoints()
    assert (step, str(folder)) == (1, str(saved))
    for name, each in run.policy.items():
        np.testing.assert_array_equal(each, policy[name])
    run.update(rows)  # and goes on as if nothing had been between
    for name, each in run.policy.items():
        np.testing.assert_allclose(each, moved[name], rtol=1e-12, err_msg=name)


def test_a_load_of_what_is_not_there_is_refused(start: Start, tmp_path: Path) -> None:
    run = start()
    before = run.policy
    with pytest.raises(errors.InvalidRequestError, match=r"trainer\.resume_mode=none"):
        run.trainer.dispatch.load_checkpoint("policy", str(tmp_path / "nothing"))
    for name, each in run.policy.items():
        np.testing.assert_array_equal(each, before[name])


def test_save_hf_model_writes_the_current_weights(start: Start, tmp_path: Path) -> None:
    run = start()
    run.update(run.rollouts())
    run.trainer.save_models()
    folder = tmp_path / "exports" / "global_step_1" / "policy"
    written = load_file(folder / "model.safetensors")
    assert sorted(written) == sorted(run.policy)
    for name, each in run.policy.items():
        np.testing.assert_allclose(written[name], each, rtol=1e-6)
    assert (folder / "tokenizer.json").exists()


def test_set_lr_refuses_instead_of_pretending(start: Start) -> None:
    with pytest.raises(errors.UnsupportedError, match=r"optimizer_config"):
        start().trainer.dispatch.set_lr("policy", 0.1)


# -- generation ---------------------------------------------------------------------------------


def test_turns_go_on_without_tokenising_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many ids that are drawn have no text at all; they stay in the next prompt and in the rows."""
    run = two_turns(start)
    drawn: dict[str, list[int]] = {}
    stock = RemoteSampler.generate

    async def generate(self: RemoteSampler, batch: Any, model: str | None = None) -> Any:
        output = await stock(self, batch, model)
        for session, ids in zip(batch["session_ids"], output["response_ids"], strict=True):
            drawn.setdefault(session, []).extend(ids)
        return output

    monkeypatch.setattr(RemoteSampler, "generate", generate)
    run.update(run.rollouts())
    asked: dict[str, list[list[int]]] = {}
    for request in run.calls.requests("generate"):
        asked.setdefault(request.params.session_id, []).append(request.prompts.to_rows()[0])
    trained = list(
        zip(*(rows_of_requests(run.sent(), name) for name in ("responses", "mask")), strict=True)
    )
    assert len(trained) == len(asked) == len(drawn) == ROWS
    # what counts in the loss is what was drawn, id for id
    kept = [[token for token, counts in zip(*row, strict=True) if counts] for row in trained]
    assert sorted(kept) == sorted(drawn.values())
    assert any(token >= len(WORDS) for row in kept for token in row)
    # and a second turn's prompt is the first turn's, what was drawn, and the environment's words
    for name, (first, second) in asked.items():
        assert second[: len(first)] == first
        turn = second[len(first) :]
        assert any(row[: len(turn)] == turn for row, _ in trained), name


def nothing_was_trained(run: Training) -> bool:
    return run.calls.count("forward_backward") == run.calls.count("optim_step") == 0


def test_a_scoring_that_fails_stops_the_training(start: Start) -> None:
    run = start("environment.env_class=broken", data="broken")
    run.trainer.global_step = 0
    with pytest.raises(ValueError, match="no score for that"):
        asyncio.run(run.trainer.train())
    assert nothing_was_trained(run)
    assert run.rows.logged == []


def test_a_generation_that_fails_stops_the_training(start: Start) -> None:
    run = start("trainer.remote.generation_attempts=1", faults=[fault("generate", call=ROWS)])
    run.trainer.global_step = 0
    with pytest.raises(errors.BackendError, match="a fault that the options"):
        asyncio.run(run.trainer.train())
    assert nothing_was_trained(run)
    assert run.rows.logged == []


# -- fully asynchronous -------------------------------------------------------------------------


def test_a_generation_goes_on_while_the_policy_is_trained_and_synced(start: Start) -> None:
    run = start(
        "trainer.fully_async.enabled=true",
        "trainer.train_batch_size=2",
        "trainer.fully_async.num_parallel_generation_workers=2",
        f"{ALGORITHM}.policy_loss_type=rollout_is",
    )
    trainer: Any = run.trainer

    async def both() -> tuple[GeneratorOutput, dict[str, float]]:
        await trainer.dispatch.save_weights_for_sampler()
        rows = run.rows_of(*await run.draw())
        await run.sampler.pause_generation()
        running = asyncio.create_task(run.draw())
        seen = run.calls.count("generate", event="started")
        while run.calls.count("generate", event="started") == seen:
            await run.session.info()
        status = await trainer._run_training(rows)
        await trainer.dispatch.save_weights_for_sampler()
        assert not running.done()
        await run.sampler.resume_generation()
        output, _ = await running
        return output, status

    output, status = asyncio.run(asyncio.wait_for(both(), 120))
    assert len(output["response_ids"]) == 2 * 4
    assert status["grad_norm"] >= 0
    assert run.calls.count("optim_step") == 1
    assert run.session.weights.version().result().sampler == 1
    assert run.sampler.rollout_metrics()["generate/policy_version_max"] == 1
