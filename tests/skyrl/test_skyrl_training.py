"""Stock SkyRL's trainers, started as users start them, against `remote-rl serve mock`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from safetensors import safe_open
from skyrl_runs import Row, Trainings
from skyrl_workload import VOCABULARY, build_inputs
from verl_runs import MockProcess, connect_and_read, serve_mock

from shims.common.checkpoints import MANIFEST

#: steps of an epoch: 8 prompts, 4 a step
EPOCH = 2


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return build_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def train(inputs: dict[str, Path], tmp_path: Path) -> Trainings:
    return Trainings(inputs, tmp_path)


def steps(rows: list[Row]) -> list[int]:
    return [row["step"] for row in rows]


def manifests(folder: Path) -> dict[int, str]:
    """Step to the server's name of its checkpoint."""
    found = sorted((folder / "ckpts").glob(f"global_step_*/policy/{MANIFEST}"))
    read = [json.loads(each.read_text()) for each in found]
    return {each["global_step"]: each["checkpoint"] for each in read}


def check_policy(row: Row) -> None:
    """What every logged step of a training must show."""
    data = row["data"]
    for name in ("final_loss", "policy_loss", "policy_entropy", "grad_norm"):
        assert math.isfinite(data[f"policy/{name}"])
    assert 0 <= data["reward/avg_raw_reward"] <= 1
    assert data["timing/sync_weights_only_transfer"] >= 0
    # tokens after the first are of the distribution that the trainer has; the first one's leaves
    # out the end of a response (min_tokens=1, which SkyRL asks of every engine)
    assert data["policy/rollout_train_logprobs_abs_diff_min"] <= 1e-6


def test_into_the_second_epoch_then_resumed_to_its_end(train: Trainings, tmp_path: Path) -> None:
    options = (
        "trainer.eval_interval=2",
        "trainer.ckpt_interval=1",
        "trainer.max_ckpts_to_keep=2",
        "trainer.hf_save_interval=3",
        "trainer.update_ref_every_epoch=true",
        "trainer.algorithm.kl_loss_coef=0.01",
        "trainer.algorithm.use_entropy_loss=true",
        "generator.sampling_params.temperature=0.7",
        "trainer.policy.optimizer_config.scheduler=linear",
        "trainer.policy.optimizer_config.num_warmup_steps=2",
        "trainer.resume_mode=latest",
    )
    with serve_mock(tmp_path / "server", vocab_size=len(VOCABULARY)) as url:
        done, rows = train(url, *options, "trainer.max_training_steps=3")
        assert done.returncode == 0, done.stdout[-6000:]
        assert steps(rows) == [1, 2, 3]
        for row in rows:
            check_policy(row)
        # two mini-batches a step, each an optimizer step, and nothing else changes the weights
        versions = connect_and_read(url)
        assert versions.trainer == versions.sampler == 2 * len(rows)
        assert versions.label == 3
        # 2 warm-up steps out of 6, the schedule moved at every optimizer step; the rate that is
        # reported is the step's own, and a row has the mean of two
        rates = [row["data"]["policy/policy_lr"] for row in rows]
        assert rates == pytest.approx([0.05 * each for each in (0.25, 0.875, 0.375)])
        assert ["eval/all/avg_score" in row["data"] for row in rows] == [False, True, True]
        kept = manifests(tmp_path)
        assert sorted(kept) == [2, 3]
        stored = tmp_path / "server" / "checkpoints" / "checkpoints"
        assert {each.name for each in stored.iterdir()} == set(kept.values())
        export = tmp_path / "exports" / "global_step_3" / "policy"
        with safe_open(export / "model.safetensors", "numpy") as weights:
            assert list(weights.keys())
        assert (export / "tokenizer.json").exists()

        done, resumed = train(url, *options)
        assert done.returncode == 0, done.stdout[-6000:]
        assert steps(resumed) == [4]
        # a version more by attaching at the base, one by the load, and two by the steps
        assert connect_and_read(url).trainer == 2 * len(rows) + 2 + 2
        assert sorted(manifests(tmp_path)) == [3, 4]


def test_a_resume_between_epochs_has_the_reference_of_the_next_one(
    train: Trainings, tmp_path: Path
) -> None:
    """The mock inside each process, its checkpoints and SkyRL's in relative folders."""
    options = (
        f"trainer.remote.backend.vocab_size={len(VOCABULARY)}",
        "trainer.remote.backend.checkpoint_dir=server",
        "trainer.ckpt_path=ckpts",
        "trainer.export_path=exports",
        "trainer.policy_mini_batch_size=4",
        "trainer.algorithm.kl_loss_coef=0.01",
        # what moves the weights whatever the rewards are
        "trainer.algorithm.use_entropy_loss=true",
        "trainer.algorithm.entropy_loss_coef=1.0",
        "trainer.policy.optimizer_config.lr=0.5",
        "trainer.update_ref_every_epoch=true",
        "trainer.ckpt_interval=10",
        "trainer.resume_mode=latest",
    )
    done, rows = train("mock", *options, f"trainer.max_training_steps={EPOCH}")
    assert done.returncode == 0, done.stdout[-6000:]
    assert rows[-1]["data"]["policy/policy_kl"] > 1e-3
    assert list(manifests(tmp_path)) == [EPOCH]
    done, rows = train("mock", *options, f"trainer.max_training_steps={EPOCH + 1}")
    assert done.returncode == 0, done.stdout[-6000:]
    assert steps(rows) == [EPOCH + 1]
    assert rows[0]["data"]["policy/policy_kl"] == pytest.approx(0, abs=1e-6)


def test_turns_corrections_and_dynamic_sampling(train: Trainings, tmp_path: Path) -> None:
    with serve_mock(tmp_path / "server", vocab_size=len(VOCABULARY)) as url:
        done, rows = train(
            url,
            "environment.env_class=looking",
            "generator.max_turns=2",
            "generator.max_input_length=64",
            "trainer.update_epochs_per_batch=2",
            "trainer.algorithm.use_kl_loss=false",
            "trainer.algorithm.use_kl_in_reward=true",
            "trainer.algorithm.loss_reduction=sequence_mean",
            "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
            "trainer.algorithm.off_policy_correction.sequence_mask_metric=geometric",
            "trainer.algorithm.off_policy_correction.geo_mask_high=1.5",
            "trainer.algorithm.off_policy_correction.geo_mask_low=0.5",
            "trainer.algorithm.dynamic_sampling.type=filter",
            "trainer.epochs=10",
            "trainer.max_training_steps=2",
            data="looking",
        )
        assert done.returncode == 0, done.stdout[-6000:]
        assert steps(rows) == [1, 2]
        for row in rows:
            check_policy(row)
            assert math.isfinite(row["data"]["loss/avg_kl"])
            assert "policy/loss_metrics/is_ratio_mean" in row["data"]
            # both turns of a trajectory are one row, the environment's words among its tokens
            assert row["data"]["generate/max_num_tokens"] > 6
        # two epochs over two mini-batches a step
        assert connect_and_read(url).trainer == 2 * 2 * len(rows)


def test_generations_go_on_while_the_policy_is_trained(train: Trainings, tmp_path: Path) -> None:
    options = (
        "trainer.fully_async.enabled=true",
        "trainer.train_batch_size=2",
        "trainer.fully_async.num_parallel_generation_workers=4",
        "trainer.fully_async.max_staleness_steps=1",
        "trainer.algorithm.policy_loss_type=rollout_is",
        "trainer.algorithm.off_policy_correction.token_mask_is_threshold_low=0.1",
        "trainer.algorithm.off_policy_correction.token_mask_is_threshold_high=10.0",
        "trainer.epochs=1",
        "trainer.ckpt_interval=2",
    )
    settings = {"vocab_size": len(VOCABULARY), "latency": "{token = 0.05}"}
    with serve_mock(tmp_path / "server", **settings) as url:
        done, rows = train(url, *options, "trainer.max_training_steps=2")
        assert done.returncode == 0, done.stdout[-6000:]
        assert steps(rows) == [1, 2]
        for row in rows:
            assert math.isfinite(row["data"]["policy/final_loss"])
            assert row["data"]["policy/grad_norm"] >= 0
        assert connect_and_read(url).trainer == 2
        # by its path: SkyRL itself counts the last checkpoint of such a training one step too far
        saved = tmp_path / "ckpts" / "global_step_2"
        resume = ("trainer.resume_mode=from_path", f"trainer.resume_path={saved}")
        done, resumed = train(url, *options, *resume)
        assert done.returncode == 0, done.stdout[-6000:]
        assert steps(resumed) == [3, 4]
        assert connect_and_read(url).trainer == 2 + 2 + 2


def test_a_generation_that_fails_for_good_stops_the_training(
    train: Trainings, tmp_path: Path
) -> None:
    faults = "[" + ", ".join(f'{{operation = "generate", call = {n}}}' for n in range(20, 60)) + "]"
    with serve_mock(tmp_path / "server", vocab_size=len(VOCABULARY), faults=faults) as url:
        done, rows = train(url)
        assert done.returncode != 0
        assert "after 3 attempts" in done.stdout
        assert "BackendError" in done.stdout
        # nothing was trained with rollouts that failed
        trained = [row for row in rows if "policy/grad_norm" in row["data"]]
        assert connect_and_read(url).trainer == 2 * len(trained)


def test_a_lost_backend_stops_the_training_which_goes_on_where_it_saved(
    train: Trainings, tmp_path: Path
) -> None:
    options = ("trainer.ckpt_interval=1", "trainer.resume_mode=latest", "trainer.epochs=50")
    server = MockProcess(
        tmp_path / "server", lease=5.0, vocab_size=len(VOCABULARY), latency="{token = 0.02}"
    )
    try:
        done, rows = train(server.url, *options, after_a_step=server.kill)
        assert done.returncode != 0
        saved = manifests(tmp_path)
        assert rows
        assert saved
        assert "UnreachableError" in done.stdout or "RunLostError" in done.stdout
        server.start()
        last = max(saved)
        done, resumed = train(server.url, *options, f"trainer.max_training_steps={last + 1}")
        assert done.returncode == 0, done.stdout[-6000:]
        assert steps(resumed) == [last + 1]
    finally:
        server.stop()


def test_the_five_minute_start(train: Trainings) -> None:
    """As docs/skyrl.md has it: stock entry point and datasets, the mock in this process."""
    done, _ = train(
        "mock",
        f"trainer.remote.backend.vocab_size={len(VOCABULARY)}",
        "trainer.max_training_steps=1",
        entry="shims.skyrl",
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "Training done!" in done.stdout
