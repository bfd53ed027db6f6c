"""What the existing Arctic plug-in for verl gets wrong, each shown to be right here, on a mock.

Losses, mini-batches and schedules are compared with verl's own functions elsewhere
(test_verl_stock_parity.py, test_verl_optimizer.py); here, that nothing gets lost on the way."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tensordict import TensorDict
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils
from verl.utils.flops_counter import FlopsCounter
from verl.workers.utils.padding import response_from_nested
from verl_rows import VOCABULARY, Log, Run, jagged, random_rows, running

from remote_rl import SamplingParams, connect, errors, losses
from shims.common.checkpoints import MANIFEST
from shims.verl import sessions
from shims.verl.config import check
from shims.verl.generation import Generation
from shims.verl.replica import RemoteReplica

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TEMPERATURE = 0.7


@pytest.fixture
def start(config: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """A run by overrides of the actor's section."""
    with ExitStack() as opened:
        yield lambda *more: opened.enter_context(
            running(config, *[f"{ACTOR}.{each}" for each in more], checkpoint_dir=tmp_path)
        )


def sent_losses(run: Run, rows: TensorDict) -> list[Any]:
    """The losses that reach the backend in an update with `rows`."""
    run.update(rows)
    return [request.loss for request in run.requests("forward_backward")]


def rollouts(run: Run, config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> TensorDict:
    """Four responses drawn as an agent loop draws them, as rows with `rollout_log_probs`."""
    monkeypatch.setattr(sessions, "member", lambda handle: run.session)
    run.worker.update_weights(global_steps=0)
    generation = Generation(config().actor_rollout_ref.rollout, handle=None)
    asked = {"temperature": TEMPERATURE, "top_p": 1.0, "top_k": -1, "logprobs": True}
    prompts = [[2, 3], [2, 3], [27, 0, 5], [9]]

    async def draw() -> list[Any]:
        each = (
            generation.generate(str(number), list(p), asked) for number, p in enumerate(prompts)
        )
        return await asyncio.gather(*each)

    drawn = asyncio.run(draw())
    masks = [[1] * len(output.token_ids) for output in drawn]
    tensors = {
        "prompts": jagged(prompts),
        "responses": jagged([output.token_ids for output in drawn]),
        "response_mask": jagged(masks),
        "loss_mask": jagged(masks),
        "rollout_log_probs": jagged([output.log_probs for output in drawn], torch.float32),
    }
    call = {"temperature": TEMPERATURE, "calculate_entropy": True}
    return tensordict_utils.get_tensordict(tensors, call)


def test_clip_values_are_the_configurations(start: Callable[..., Run]) -> None:
    clip = ("clip_ratio_low=0.11", "clip_ratio_high=0.37", "clip_ratio_c=4.5")
    run = start(*clip)
    [loss] = sent_losses(run, random_rows(run.policy))
    assert (loss.clip_low, loss.clip_high, loss.dual_clip) == (0.11, 0.37, 4.5)


def test_loss_mode_and_scale_factor_are_the_configurations(start: Callable[..., Run]) -> None:
    run = start(
        "policy_loss.loss_mode=cispo",
        "loss_agg_mode=seq-mean-token-sum-norm",
        "loss_scale_factor=13",
    )
    [loss] = sent_losses(run, random_rows(run.policy))
    assert isinstance(loss, losses.CISPO)
    assert loss.aggregation == losses.sequence_mean_token_sum_norm(13, 6)


def test_rollout_old_and_reference_logprobs_are_of_one_temperature(
    start: Callable[..., Run], config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start()
    rows = rollouts(run, config, monkeypatch)
    found = {"rollout": rows["rollout_log_probs"].values()}
    for name, call in (
        ("old", run.worker.compute_log_prob),
        ("reference", run.worker.compute_ref_log_prob),
    ):
        nested = response_from_nested(call(rows)["log_probs"], rows["response_mask"])
        found[name] = nested.values()
    # and what the update computes itself: on policy every ratio is 1, and KL to the reference 0
    rows["old_log_probs"] = jagged(_rows_of(rows, found["old"]), torch.float32)
    rows["ref_log_prob"] = jagged(_rows_of(rows, found["reference"]), torch.float32)
    rows["advantages"] = rows["old_log_probs"] * 0 + 1
    tensordict_utils.assign_non_tensor(rows, mini_batch_size=4, global_batch_size=4)
    metrics = run.update(rows)
    assert metrics["actor/ppo_kl"] == [pytest.approx(0, abs=1e-6)]
    assert metrics["ratio_max"] == [pytest.approx(1, abs=1e-6)]
    assert metrics["kl_loss"] == [pytest.approx(0, abs=1e-6)]
    for name in ("old", "reference"):
        assert (found[name].exp() - found["rollout"].exp()).abs().max() < 1e-6, name
    temperatures = [request.batch.temperature for request in run.requests("forward")]
    assert all((each == np.float32(TEMPERATURE)).all() for each in temperatures)


def _rows_of(rows: TensorDict, values: torch.Tensor) -> list[torch.Tensor]:
    return list(values.split([len(row) for row in rows["responses"].unbind()]))


def test_importance_weights_belong_to_their_tokens(start: Callable[..., Run]) -> None:
    run = start()
    rows = random_rows(run.policy, weighted=True)
    run.update(rows)
    [request] = run.requests("forward_backward")
    wanted = [row.tolist() for row in rows["rollout_is_weights"].unbind()]
    assert request.batch.importance_weights.to_rows() == wanted


def test_shuffle_and_seed_are_the_calls(start: Callable[..., Run]) -> None:
    run = start()
    call = {"seed": 5, "dataloader_kwargs": {"shuffle": True}}
    rows = random_rows(run.policy, mini_batch_size=2, global_batch_size=2, **call)
    run.update(rows)
    found = [request.batch.responses.to_rows() for request in run.requests("forward_backward")]
    stock = tensordict_utils.make_iterator(rows, mini_batch_size=2, epochs=1, **call)
    wanted = [[row.tolist() for row in piece["responses"].unbind()] for piece in stock]
    assert found == wanted
    assert found[0] != [row.tolist() for row in rows["responses"].unbind()[:2]]


def test_mini_batches_are_the_calls_not_the_configurations(start: Callable[..., Run]) -> None:
    run = start("ppo_mini_batch_size=6")
    run.update(random_rows(run.policy, mini_batch_size=3, global_batch_size=3, epochs=2))
    assert [len(request.batch) for request in run.requests("forward_backward")] == [3] * 4
    assert len(run.requests("optim_step")) == 4


class Group:
    """verl's actor group, of one worker in this process."""

    def __init__(self, run: Run, rows: TensorDict) -> None:
        self._run, self._rows = run, rows

    def update_actor(self, batch: Any) -> TensorDict:
        tensordict_utils.assign_non_tensor(self._rows, **batch.extra_info)
        done: TensorDict = self._run.worker.update_actor(self._rows)
        return done


def test_an_entropy_bonus_needs_no_calculate_entropy(
    start: Callable[..., Run], config: Callable[..., Any]
) -> None:
    """verl's trainer asks for the entropy where there is a coefficient; the bonus is applied."""
    overrides = ("entropy_coeff=0.25", "calculate_entropy=false", "ppo_mini_batch_size=3")
    run = start(*overrides)
    whole = config(*[f"{ACTOR}.{each}" for each in overrides], f"{ROLLOUT}.n=2")
    rows = random_rows(run.policy)
    trainer = SimpleNamespace(config=whole, actor_rollout_wg=Group(run, rows))
    metrics: dict[str, float] = {}
    PPOTrainer._update_actor(trainer, SimpleNamespace(extra_info={}), metrics)  # type: ignore[arg-type]
    [request] = run.requests("forward_backward")
    assert request.loss.entropy.coef == 0.25
    assert metrics["actor/entropy_loss"] > 0


@pytest.mark.parametrize(
    ("override", "key"),
    [
        (f"{ACTOR}.policy_loss.loss_mode=vanila", f"{ACTOR}.policy_loss.loss_mode"),
        (f"{ACTOR}.loss_agg_mode=token-median", f"{ACTOR}.loss_agg_mode"),
        (f"{ACTOR}.kl_loss_type=k4", f"{ACTOR}.kl_loss_type"),
        (f"{ACTOR}.optim.optimizer=SGD", f"{ACTOR}.optim.optimizer"),
        (f"{ACTOR}.clip_ratio_hihg=0.3", f"{ACTOR}.clip_ratio_hihg"),
    ],
)
def test_an_unknown_value_is_refused_by_its_key(
    config: Callable[..., Any], override: str, key: str
) -> None:
    with pytest.raises(errors.UnsupportedError) as raised:
        check(config(override))
    assert raised.value.details["key"] == key


def test_the_optimizer_is_the_configurations(start: Callable[..., Run]) -> None:
    run = start(
        "optim.betas=[0.8,0.97]",
        "optim.weight_decay=0.3",
        "optim.clip_grad=0.7",
        "optim.override_optimizer_config={eps: 1e-5}",
    )
    run.update(random_rows(run.policy))
    [request] = run.requests("optim_step")
    adamw = request.optimizer
    assert (adamw.betas, adamw.eps) == ((0.8, 0.97), 1e-5)
    assert (adamw.weight_decay, adamw.max_grad_norm) == (0.3, 0.7)


def test_no_text_is_made_of_token_ids(
    start: Callable[..., Run], config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the rollout to the update no tokenizer is asked, and the ids stay the same."""
    for name in ("__call__", "encode", "decode", "batch_decode", "convert_ids_to_tokens"):

        def asked(*_: Any, name: str = name, **__: Any) -> Any:
            raise AssertionError(f"the tokenizer's {name} was called")

        monkeypatch.setattr(transformers.PreTrainedTokenizerBase, name, asked)
    run = start("use_kl_loss=false")
    rows = rollouts(run, config, monkeypatch)
    run.worker.compute_log_prob(rows)
    rows["old_log_probs"] = rows["rollout_log_probs"]
    rows["advantages"] = rows["rollout_log_probs"] * 0 + 1
    tensordict_utils.assign_non_tensor(rows, mini_batch_size=4, global_batch_size=4)
    run.update(rows)
    drawn = [row.tolist() for row in rows["responses"].unbind()]
    asked_for = [request.prompts.to_rows()[0] for request in run.requests("generate")]
    assert sorted(asked_for) == sorted([[2, 3], [2, 3], [27, 0, 5], [9]])
    for operation in ("forward", "forward_backward"):
        [request] = run.requests(operation)
        assert request.batch.responses.to_rows() == drawn


def test_saving_blocks_and_honours_path_step_and_retention(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    run = start()
    names = []
    for step in (1, 2, 3):
        folder = tmp_path / "verl" / f"global_step_{step}" / "actor"
        run.worker.save_checkpoint(str(folder), global_step=step, max_ckpt_to_keep=2)
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        assert manifest["global_step"] == step
        names.append(manifest["checkpoint"])
        listed = [info.name for info in run.session.training.checkpoints().result()]
        assert listed == names[-2:]  # complete when the call returns; the oldest is gone
    assert not (tmp_path / "verl" / "global_step_1" / "actor").exists()


def test_a_saved_checkpoint_is_loaded(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start("optim.lr_scheduler_type=cosine")
    folder = str(tmp_path / "verl" / "global_step_1" / "actor")
    run.update(random_rows(run.policy))
    run.worker.save_checkpoint(folder, global_step=1)
    saved, rate = run.policy, run.worker._optimizer.lr
    run.update(random_rows(run.policy, random_seed=1))
    moved = run.policy
    run.worker.load_checkpoint(folder, del_local_after_load=True)
    assert run.worker._optimizer.lr == rate
    for name, array in run.policy.items():
        assert np.array_equal(array, saved[name]), name
    run.update(random_rows(saved, random_seed=1))  # and goes on as if nothing had been between
    for name, array in run.policy.items():
        np.testing.assert_allclose(array, moved[name], rtol=1e-12, err_msg=name)


def test_the_samplers_logprobs_reach_verl(
    start: Callable[..., Run], config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rollouts(start(), config, monkeypatch)
    for tokens, logprobs in zip(
        rows["responses"].unbind(), rows["rollout_log_probs"].unbind(), strict=True
    ):
        assert len(tokens) == len(logprobs)
        assert (logprobs < 0).all()


def test_an_abort_ends_what_runs(
    config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, section = Log(), config().actor_rollout_ref
    latency = {"token": 3600.0}  # only an abort ends it
    with connect("mock", vocab_size=VOCABULARY, latency=latency, call_log=log) as session:
        monkeypatch.setattr(sessions, "member", lambda handle: session)
        replica = RemoteReplica(0, section.rollout, section.model, gpus_per_node=1)

        async def control() -> str:
            await replica.init_standalone()
            running = session.sampling.generate([[2, 3]], SamplingParams(max_tokens=4))
            assert await asyncio.to_thread(log.generating.wait, 30)
            await replica.abort_all_requests()
            groups = await running
            return groups[0].samples[0].finish_reason

        assert asyncio.run(control()) == "abort"


_IMPORTS = """
import importlib.abc, pkgutil, sys, traceback

asked = []

class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("vllm", "sglang", "deepspeed"):
            frames = [frame.filename for frame in traceback.extract_stack()[:-1]]
            asked.append([each for each in frames if not each.startswith("<frozen")][-1])

sys.meta_path.insert(0, Watch())
import shims.verl
shims.verl.register()
for module in pkgutil.walk_packages(shims.verl.__path__, "shims.verl."):
    if not module.name.startswith("shims.verl.remote_backend"):  # that needs the seam
        __import__(module.name)
try:
    import vllm
except ImportError:
    assert asked[-1] == "<string>", asked  # the watch sees who asks
print([name for name in asked if "/shims/" in name])
"""


def test_the_shim_imports_no_engine() -> None:
    """verl's own modules look whether vLLM is there; nothing of the shim's does."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _IMPORTS],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_verls_flops_counter_is_never_asked(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: Any, **__: Any) -> Any:
        raise AssertionError("verl's FlopsCounter was used, which needs CUDA")

    monkeypatch.setattr(FlopsCounter, "__init__", asked)
    monkeypatch.setattr(FlopsCounter, "estimate_flops", asked)
    run = start()
    rows = random_rows(run.policy)
    run.worker.compute_log_prob(rows)
    assert run.update(rows)["mfu"] == [0.0]  # the mock of this test tells no peak
