"""Throughput and utilisation in verl's metrics: from the server's count, 0 with a reason where a
peak is unknown."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from test_verl_updates import VOCABULARY, update_rows
from verl.trainer.ppo.metric_utils import compute_throughout_metrics
from verl.utils import tensordict_utils
from verl_rows import AttachedWorker

from remote_rl import Devices, Operation, Session, Work, connect, mfu
from remote_rl.types import ForwardBackwardResult, OptimStepResult, Outputs
from shims.verl.metrics import Meter
from shims.verl.trainer import RemoteAsyncTrainer, RemoteTrainer

PEAK = 1e9
DEVICES = Devices(kind="x", count=4, total=6, dtype="bfloat16", peak_flops=8.0)
UNKNOWN = Devices(kind="x", count=4, dtype="bfloat16", peak_flops=None, reason="a new kind")


def outputs(work: Work | None) -> Outputs:
    return Outputs(values={}, version=0, work=work)


def work(flops: float, seconds: float, tokens: int = 10) -> Work:
    return Work(tokens=tokens, flops=flops, seconds=seconds)


# -- the meter -----------------------------------------------------------------------------------


def test_an_update_is_measured_by_all_of_its_operations() -> None:
    meter = Meter(DEVICES)
    found = meter.update([work(8.0, 0.5), work(0.0, 0.25, tokens=0), work(16.0, 0.25)])
    assert found["mfu"] == [24.0 / (1.0 * 4 * 8.0)]  # of the devices that train
    assert "mfu_infer" not in found  # there was no forward for old logprobs
    assert found["computed_tokens"] == [20.0]
    assert found["computing_seconds"] == [1.0]
    assert found["computed_throughput"] == [20.0 / (1.0 * 4)]


def test_forwards_count_for_the_step_and_once() -> None:
    meter = Meter(DEVICES)
    assert meter.forward(outputs(work(4.0, 0.5)), "current") == 4.0 / (0.5 * 32)
    meter.forward(outputs(work(4.0, 0.25)), "reference")
    found = meter.update([work(8.0, 0.5)])
    assert found["mfu"] == [8.0 / (0.5 * 32)]
    assert found["mfu_infer"] == [4.0 / (0.5 * 32)]  # not the reference's
    assert found["computed_tokens"] == [30.0]
    assert found["computing_seconds"] == [1.25]
    again = meter.update([work(8.0, 0.5)])
    assert again["computed_tokens"] == [10.0]
    assert "mfu_infer" not in again


def test_an_unknown_peak_is_0_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    meter = Meter(UNKNOWN)
    with caplog.at_level(logging.WARNING, "remote_rl.shims.verl"):
        assert meter.forward(outputs(work(1.0, 1.0)), "current") == 0.0
        assert meter.update([work(1.0, 1.0)])["mfu"] == [0.0]
    assert caplog.messages == ["perf/mfu is 0: a new kind"]


def test_a_server_that_counts_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "remote_rl.shims.verl"):
        found = Meter().update([None, work(1.0, 1.0)])
    assert found == {"mfu": [0.0]}
    assert "does not count" in caplog.text


# -- on the worker -------------------------------------------------------------------------------


class Recorder:
    """A training face that keeps its results."""

    def __init__(self, face: Any) -> None:
        self._face = face
        self.results: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._face, name)

        def called(*arguments: Any, **options: Any) -> Any:
            operation = method(*arguments, **options)
            self.results.append(operation)
            return operation

        return called

    def works(self, kind: type[Any]) -> list[Work]:
        found = [each.result() for each in self.results if isinstance(each, Operation)]
        return [each.work for each in found if isinstance(each, kind)]


@pytest.fixture
def session() -> Iterator[Session]:
    with connect("mock", vocab_size=VOCABULARY, peak_flops=PEAK) as held:
        yield held


def worker_of(
    config: Callable[..., Any], session: Session, *more: str
) -> tuple[AttachedWorker, Recorder]:
    recorder = Recorder(session.training)
    seen = SimpleNamespace(training=recorder, info=session.info, weights=session.weights)
    whole = config("actor_rollout_ref.actor.optim.total_training_steps=5", *more)
    worker = AttachedWorker(whole.actor_rollout_ref, seen)
    worker.init_model()
    return worker, recorder


def test_the_workers_metrics_are_the_servers_count(
    config: Callable[..., Any], session: Session
) -> None:
    worker, recorder = worker_of(config, session)
    computed = worker.compute_log_prob(update_rows())
    worker.compute_ref_log_prob(update_rows())
    metrics = tensordict_utils.get(worker.update_actor(update_rows()), "metrics")
    (old, reference) = recorder.works(Outputs)
    trained = recorder.works(ForwardBackwardResult) + recorder.works(OptimStepResult)
    assert len(trained) == 2 * 2
    devices = session.info().result().devices
    share, _ = mfu(Work.total(trained), devices)
    assert share is not None
    assert share > 0
    assert metrics["mfu"] == [share]
    assert metrics["mfu_infer"] == [mfu(old, devices)[0]]
    assert tensordict_utils.get(computed, "metrics")["mfu"] == metrics["mfu_infer"][0]
    total = Work.total([old, reference, *trained])
    assert total is not None
    tokens = sum(len(row) for row in update_rows()["responses"].unbind())
    assert metrics["computed_tokens"] == [total.tokens] == [3 * tokens]
    assert metrics["computing_seconds"] == [pytest.approx(total.seconds)]


def test_forwards_that_verls_own_losses_need_count_into_the_update(
    config: Callable[..., Any], session: Session
) -> None:
    worker, recorder = worker_of(
        config, session, "actor_rollout_ref.actor.policy_loss.loss_mode=sapo"
    )
    metrics = tensordict_utils.get(worker.update_actor(update_rows()), "metrics")
    extra, trained = recorder.works(Outputs), recorder.works(ForwardBackwardResult)
    assert len(extra) == 2  # nothing was known of either mini-batch
    share, _ = mfu(
        Work.total([*extra, *trained, *recorder.works(OptimStepResult)]),
        session.info().result().devices,
    )
    assert metrics["mfu"] == [share]
    assert "mfu_infer" not in metrics


# -- in the trainer ------------------------------------------------------------------------------


class Group:
    """verl's actor group, of which one call is asked."""

    def __init__(self, metrics: dict[str, list[float]]) -> None:
        self._metrics = metrics

    def update_actor(self, batch: Any) -> Any:
        return tensordict_utils.get_tensordict({}, non_tensor_dict={"metrics": self._metrics})


@pytest.mark.parametrize("kind", [RemoteTrainer, RemoteAsyncTrainer])
def test_verls_trainer_logs_them_by_its_own_names(config: Callable[..., Any], kind: Any) -> None:
    trainer = object.__new__(kind)
    trainer.config, trainer.distillation_config = config(), None
    meter = Meter(DEVICES)
    meter.forward(outputs(work(4.0, 0.5)), "current")
    trainer.actor_rollout_wg = Group({"loss": [1.0], **meter.update([work(8.0, 0.5)])})
    metrics: dict[str, Any] = {}
    batch = SimpleNamespace(extra_info={})
    assert trainer._update_actor(batch, metrics) is batch
    assert metrics == {
        "actor/loss": 1.0,
        "perf/mfu/actor": 0.5,
        "perf/mfu/actor_infer": 0.25,
        "perf/computed_tokens": 20.0,
        "perf/computing_seconds": 1.0,
        "perf/computed_throughput": 5.0,
    }


@pytest.mark.parametrize("kind", [RemoteTrainer, RemoteAsyncTrainer])
@pytest.mark.parametrize(("devices", "count"), [(DEVICES, 6), (UNKNOWN, 4), (None, 1)])
def test_throughput_is_divided_by_the_servers_devices(
    kind: Any, devices: Devices | None, count: int
) -> None:
    trainer = object.__new__(kind)
    trainer._devices = devices
    data = SimpleNamespace(meta_info={"global_token_num": [100, 140]})
    divided = compute_throughout_metrics(
        data, {"step": 2.0}, n_gpus=trainer._get_n_gpus_for_throughput()
    )
    assert divided["perf/throughput"] == 240 / (2.0 * count)
