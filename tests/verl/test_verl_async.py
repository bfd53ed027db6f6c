"""Parts of the asynchronous trainer: resumed responses, weights kept aside, deliveries, keys."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from verl.checkpoint_engine import CheckpointEngineManager
from verl.checkpoint_engine.base import CheckpointEngineRegistry
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.utils import hf_tokenizer
from verl.workers.config import CheckpointEngineConfig
from verl.workers.rollout.replica import RolloutMode
from verl_rows import Log
from verl_workload import asynchronous

from remote_rl import AdamW, Batch, SamplingParams, Session, connect, errors, losses
from remote_rl.types import Sample
from shims.common.drawing import continued
from shims.verl import ASYNC_NAME, failures, sessions
from shims.verl.aside import WeightsAside
from shims.verl.config import check
from shims.verl.delivery import ServerDelivery
from shims.verl.generation import Generation
from shims.verl.matching import check_server
from shims.verl.replica import RemoteReplica
from shims.verl.trainer import RemoteAsyncTrainer, _without_info

ROLLOUT = "actor_rollout_ref.rollout"
TOKENS = 24


def sample(tokens: list[int], version: int, finish_reason: str = "abort", **more: Any) -> Sample:
    logprobs = [-float(token) for token in tokens]
    return Sample(
        **{
            "tokens": tokens,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "first_version": version,
            "last_version": version,
            "first_label": 10 * version,
            "label": 10 * version,
            "prompt_index": 0,
            "index": 0,
            **more,
        }
    )


# -- responses that a delivery ended -----------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=5))
def test_a_continued_response_is_all_of_its_parts(parts: list[list[int]]) -> None:
    whole = sample(parts[0], 1)
    for version, part in enumerate(parts[1:], start=2):
        last = "stop" if version == len(parts) else "abort"
        whole = continued(whole, sample(part, version, last))
    tokens = [token for part in parts for token in part]
    assert whole.tokens.tolist() == tokens
    assert whole.logprobs is not None
    assert whole.logprobs.tolist() == [-float(token) for token in tokens]
    assert whole.finish_reason == ("stop" if len(parts) > 1 else "abort")
    drawn = [version for version, part in enumerate(parts, start=1) if part]
    if drawn:  # versions and labels are those of the first and the last token
        assert (whole.first_version, whole.last_version) == (drawn[0], drawn[-1])
        assert (whole.first_label, whole.label) == (10 * drawn[0], 10 * drawn[-1])


class Scripted:
    """A session whose generates have the given outcomes."""

    def __init__(self, *outcomes: Any) -> None:
        self.sampling = self
        self.asked: list[tuple[list[int], int]] = []
        self._outcomes = iter(outcomes)

    async def generate(self, prompts: Any, params: Any) -> Any:
        self.asked.append((prompts[0], params.max_tokens))
        outcome = next(self._outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return (SimpleNamespace(samples=[outcome]),)


@pytest.fixture
def generation(config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """What an agent loop generates with, on the given session."""

    def make(session: Any, resumes: bool = True) -> Generation:
        monkeypatch.setattr(sessions, "member", lambda handle: session)
        rollout = config(f"{ROLLOUT}.response_length={TOKENS}").actor_rollout_ref.rollout
        return Generation(rollout, handle=None, resumes=resumes)

    return make


def generate(generation: Generation) -> Any:
    asked = {"temperature": 0.9, "logprobs": True, "max_tokens": 4}
    return asyncio.run(generation.generate("request", [2, 3], asked))


def test_an_ended_response_is_continued_within_its_budget(
    generation: Callable[..., Any],
) -> None:
    session = Scripted(
        sample([], 1),
        sample([7, 8], 2),
        errors.BackendError("tried again, and nothing drawn so far is lost"),
        sample([9], 3),
        sample([6], 4, "length"),
    )
    output = generate(generation(session))
    assert output.token_ids == [7, 8, 9, 6]
    assert output.log_probs == [-7.0, -8.0, -9.0, -6.0]
    assert output.stop_reason == "completed"
    assert output.extra_fields == {
        "global_steps": 40,
        "min_global_steps": 20,
        "max_global_steps": 40,
    }
    first, second, third = ([2, 3], 4), ([2, 3, 7, 8], 2), ([2, 3, 7, 8, 9], 1)
    assert session.asked == [first, first, second, second, third]


def test_a_response_that_was_ended_at_its_last_token_is_complete(
    generation: Callable[..., Any],
) -> None:
    session = Scripted(sample([7, 8, 9, 6], 1))
    assert generate(generation(session)).stop_reason == "completed"
    assert len(session.asked) == 1


def test_the_synchronous_trainer_sees_what_was_ended(generation: Callable[..., Any]) -> None:
    output = generate(generation(Scripted(sample([7], 1)), resumes=False))
    assert (output.token_ids, output.stop_reason) == ([7], "aborted")


@pytest.mark.parametrize(("in_flight", "requests"), [("keep", 1), ("abort", 2)])
def test_no_token_is_lost_at_a_delivery(
    generation: Callable[..., Any], in_flight: Any, requests: int
) -> None:
    log = Log()
    with connect("mock", vocab_size=28, latency={"token": 0.05}, call_log=log) as session:
        session.weights.sync(label=0).result()
        runner = generation(session)

        async def deliver_meanwhile() -> Any:
            asked = {"temperature": 0.9, "logprobs": True}
            running = asyncio.create_task(runner.generate("request", [2, 3], asked))
            assert await asyncio.to_thread(log.generating.wait, 30)
            await session.weights.sync(in_flight=in_flight, label=1)
            return await running

        output = asyncio.run(deliver_meanwhile())
        begun = [call.operation for call in log if call.event == "started"]
        assert begun.count("generate") == requests
        assert len(output.token_ids) == TOKENS
        assert output.extra_fields["max_global_steps"] == 1
        batch = Batch(
            prompts=[[2, 3]], prompt_index=[0], responses=[output.token_ids], temperature=0.9
        )
        trained = session.training.forward(batch).result()["logprobs"]
        np.testing.assert_allclose(output.log_probs, trained.values, rtol=0, atol=1e-6)


def test_the_replica_ends_generation_and_holds_it(
    config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, params = Log(), SamplingParams(max_tokens=TOKENS)
    section = config().actor_rollout_ref
    with connect("mock", vocab_size=28, latency={"token": 0.05}, call_log=log) as session:
        monkeypatch.setattr(sessions, "member", lambda handle: session)
        replica = RemoteReplica(0, section.rollout, section.model, gpus_per_node=1)

        async def control() -> list[str]:
            await replica.init_standalone()
            running = session.sampling.generate([[2, 3]], params)
            assert await asyncio.to_thread(log.generating.wait, 30)
            await replica.abort_all_requests()
            ended = await running
            held = session.sampling.generate([[2, 3]], params)
            await session.info()
            assert not held.done()
            await replica.resume_generation()
            return [groups[0].samples[0].finish_reason for groups in (ended, await held)]

        assert asyncio.run(control()) == ["abort", "length"]
        assert (replica.rollout_mode, replica.workers) == (RolloutMode.STANDALONE, [])
        with pytest.raises(errors.UnsupportedError, match="reject_request"):
            asyncio.run(replica.abort_all_requests(reject_request=True))


# -- weights that decoupled PPO keeps aside ----------------------------------------------------


@pytest.fixture
def session() -> Iterator[Session]:
    with connect("mock", vocab_size=28) as held:
        yield held


def logprobs(session: Session) -> list[float]:
    batch = Batch(prompts=[[2, 3]], prompt_index=[0], responses=[[4, 5, 6]], temperature=1.0)
    values: list[float] = session.training.forward(batch).result()["logprobs"].values.tolist()
    return values


def step(session: Session) -> None:
    batch = Batch(prompts=[[2, 3]], prompt_index=[0], responses=[[4, 5, 6]], temperature=1.0)
    session.training.forward_backward(batch, losses.CrossEntropy()).result()
    session.training.optim_step(AdamW(lr=0.01)).result()


def test_weights_are_kept_restored_replaced_and_forgotten(session: Session) -> None:
    aside = WeightsAside(session)
    begun = logprobs(session)
    aside.save(0)
    step(session)
    trained = logprobs(session)
    assert trained != begun
    aside.save(1)
    aside.restore(0)
    assert logprobs(session) == begun
    aside.restore(1)
    assert logprobs(session) == trained
    aside.clear(1)
    aside.clear(1)  # as verl's, which does nothing then
    with pytest.raises(errors.InvalidRequestError, match=r"save_model_to_cpu\(1\)"):
        aside.restore(1)
    aside.save(0)  # the next cycle's
    step(session)
    aside.restore(0)
    assert logprobs(session) == trained


def test_two_trainings_on_one_run_keep_theirs_apart(session: Session) -> None:
    first, second = WeightsAside(session), WeightsAside(session)
    first.save(0)
    second.save(0)
    second.clear(0)
    first.restore(0)


# -- deliveries --------------------------------------------------------------------------------


class Actors:
    """verl's worker group, whose one worker answers at once."""

    world_size = 1

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def update_weights(self, **arguments: Any) -> list[Any]:
        self.calls.append(arguments)
        return [{"weights/version": 2}]


def test_a_delivery_is_one_call_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", lambda answers: answers)
    actors = Actors()
    settings = CheckpointEngineConfig(backend="remote_rl")
    stock = CheckpointEngineManager(config=settings, actor_wg=actors, replicas=[])
    delivery = ServerDelivery(config=settings, actor_wg=actors, replicas=stock.replicas)
    assert delivery.update_weights(3) == {"weights/version": 2}
    assert actors.calls == [{"global_steps": 3, "mode": "remote_rl"}]


def test_nothing_can_be_sent_through_the_engine() -> None:
    engine = CheckpointEngineRegistry.new("remote_rl", bucket_size=1 << 20)
    for name in ("prepare", "finalize", "init_process_group", "build_topology", "send_weights"):
        with pytest.raises(errors.UnsupportedError, match="carries no weights"):
            getattr(engine, name)()


# -- trainer and configuration -----------------------------------------------------------------


def test_the_trainer_is_verls_own_under_the_shims_name() -> None:
    assert get_trainer_cls(ASYNC_NAME) is RemoteAsyncTrainer
    assert issubclass(RemoteAsyncTrainer, PPOTrainerSeparateAsync)


def test_a_verl_that_can_not_do_without_its_own_replicas_is_refused(
    async_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(PPOTrainerSeparateAsync, "_enable_hybrid_replicas")  # as in 0.9.0
    with pytest.raises(errors.UnsupportedError, match=r"needs verl 0\.9\.1"):
        RemoteAsyncTrainer(async_config())


def test_verls_broken_log_call_is_not_made_and_its_level_comes_back() -> None:
    name = PPOTrainerSeparateAsync.__module__
    logger = logging.getLogger(name)
    level = logger.level
    with _without_info(name):
        logger.info("verl 0.9.1 gives it flush=True", flush=True)  # type: ignore[call-arg]
    assert logger.level == level


def test_a_note_that_is_being_written_is_no_failure_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: dict[str, dict[str, str]] = {"a": {}}
    listed = {"remote_rl_failures": notes}
    monkeypatch.setattr(failures.transfer_queue, "kv_list", lambda partition_id: listed)
    failures.raise_reported()
    notes["a"]["error"] = "RunLostError: gone"
    with pytest.raises(errors.BackendError, match=r"1 of the generations.*RunLostError: gone"):
        failures.raise_reported()


def test_notes_of_an_earlier_training_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = {"remote_rl_failures": {"a": {"error": "old"}}, "train": {"b": {}}}

    def clear(keys: list[str], partition_id: str) -> None:
        for key in keys:
            del queue[partition_id][key]

    monkeypatch.setattr(failures.transfer_queue, "kv_list", lambda partition_id: queue)
    monkeypatch.setattr(failures.transfer_queue, "kv_clear", clear)
    with pytest.raises(errors.BackendError, match="old"):
        failures.raise_reported()
    failures.forget()
    failures.raise_reported()
    assert queue["train"] == {"b": {}}


@pytest.fixture
def async_config(config: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *more: config(*asynchronous(), *more)


def test_the_asynchronous_training_of_the_tests_is_accepted(
    async_config: Callable[..., Any],
) -> None:
    assert check(async_config()).in_flight == "keep"


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("actor_rollout_ref.hybrid_engine=true", "actor_rollout_ref.hybrid_engine"),
        (f"{ROLLOUT}.nnodes=0", f"{ROLLOUT}.nnodes"),
        (f"{ROLLOUT}.checkpoint_engine.backend=nccl", f"{ROLLOUT}.checkpoint_engine.backend"),
        (f"{ROLLOUT}.checkpoint_engine.backend=naive", f"{ROLLOUT}.checkpoint_engine.backend"),
        (
            "trainer.v1.separate_async.hybrid_rollout.enable_switch=true",
            "trainer.v1.separate_async.hybrid_rollout.enable_switch",
        ),
    ],
)
def test_what_it_can_not_honour_is_refused_by_name(
    async_config: Callable[..., Any], override: str, key: str
) -> None:
    with pytest.raises(errors.UnsupportedError) as raised:
        check(async_config(override))
    assert str(raised.value).startswith(f"{key}=")


def test_a_word_for_in_flight_that_does_not_exist_is_refused(
    async_config: Callable[..., Any],
) -> None:
    with pytest.raises(errors.InvalidRequestError, match="in_flight"):
        check(async_config(f"{ROLLOUT}.engine_kwargs.remote_rl.in_flight=drop"))


@pytest.mark.parametrize(
    ("kind", "name", "override", "key"),
    [
        (
            "in_flight",
            "keep",
            "trainer.save_freq=1",
            f"{ROLLOUT}.engine_kwargs.remote_rl.in_flight",
        ),
        (
            "operations",
            "snapshot",
            "trainer.save_freq=1",
            "algorithm.rollout_correction.bypass_mode",
        ),
        ("operations", "snapshot", "algorithm.rollout_correction.bypass_mode=true", None),
        ("operations", "snapshot", "trainer.v1.trainer_mode=sync", None),
    ],
)
def test_what_the_server_lacks_is_refused_when_the_trainer_attaches(
    async_config: Callable[..., Any],
    inputs: dict[str, Path],
    tmp_path: Path,
    kind: str,
    name: str,
    override: str,
    key: str | None,
) -> None:
    given = async_config(
        "trainer.v1.trainer_mode=separate_async", *([override] if override else [])
    )
    tokenizer = hf_tokenizer(str(inputs["model"]))
    with connect("mock", vocab_size=28, checkpoint_dir=tmp_path) as session:
        info = session.info().result()
    check_server(given, tokenizer, info)
    kept = getattr(info.capabilities, kind) - {name}
    poorer = attrs.evolve(info, capabilities=attrs.evolve(info.capabilities, **{kind: kept}))
    if key is None:
        check_server(given, tokenizer, poorer)
        return
    with pytest.raises(errors.UnsupportedError) as raised:
        check_server(given, tokenizer, poorer)
    assert str(raised.value).startswith(f"{key} needs {name!r}")
