"""The call log's questions, and the mock behind a server, without pytest's fixtures."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import remote_rl
from remote_rl import AdamW, Batch, SamplingParams, Session, connect, losses
from remote_rl.errors import (
    BackendError,
    InvalidRequestError,
    RunLostError,
    UnknownNameError,
)
from remote_rl.testing import CallLog, LoopbackServer, MockServer, fault


def step(rl: Session) -> float:
    groups = rl.sampling.generate([[1]], SamplingParams(n=2, max_tokens=2)).result()
    rl.training.forward_backward(Batch.from_groups(groups, advantages=[1.0, -1.0]), losses.PPO())
    norm: float = rl.training.optim_step(AdamW(lr=0.1)).result().grad_norm
    rl.weights.sync(label="here").result()
    return norm


@pytest.fixture
def log() -> CallLog:
    """Of two steps and a generate that fails."""
    log = CallLog()
    with connect("mock", call_log=log.records, faults=[fault("generate", call=3)]) as rl:
        step(rl)
        step(rl)
        with pytest.raises(BackendError):
            step(rl)
    return log


def test_names_in_order(log: CallLog) -> None:
    turn = ["generate", "forward_backward", "optim_step", "sync"]
    assert log.names() == ["start", *turn, *turn]
    assert log.names("sync", "optim_step") == ["optim_step", "sync"] * 2
    assert log.names(event="started") == ["start", *turn, *turn, "generate"]
    assert log.failed == ["generate"]
    assert len(log) == len(list(log)) == 2 * len(log.names(event="started"))
    assert "optim_step" in repr(log)


def test_counts(log: CallLog) -> None:
    assert log.count("generate") == 2
    assert log.count("generate", event="started") == 3
    assert log.count("generate", event="failed") == 1
    assert log.count("save") == 0


def test_requests(log: CallLog) -> None:
    assert [request.params.n for request in log.requests("generate")] == [2, 2]
    assert [request.label for request in log.requests("sync")] == ["here", "here"]
    assert log.requests("optim_step")[0].optimizer == AdamW(lr=0.1)
    assert len(log.requests("forward_backward")[1].batch) == 2
    assert log.requests("start") == [None]


def test_a_name_that_could_not_be_found_is_refused(log: CallLog) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'optim_step'"):
        log.count("optimstep")
    with pytest.raises(UnknownNameError):
        log.names("sync", "generat")
    for name in ("version", "info", "checkpoints", "abort"):
        with pytest.raises(InvalidRequestError, match="dispatcher"):
            log.requests(name)
    with pytest.raises(InvalidRequestError, match="'started', 'ended', 'failed'"):
        log.names(event="done")  # type: ignore[arg-type]


def test_runs_and_clear(log: CallLog) -> None:
    with connect("mock", call_log=log.records) as rl:
        rl.weights.sync().result()
    first, second = log.runs()
    assert first.count("optim_step") == 2
    assert second.names() == ["start", "sync"]
    log.clear()
    assert (len(log), log.runs()) == (0, [])


def test_waiting_for_another_thread() -> None:
    log = CallLog()
    with connect("mock", call_log=log.records, latency=0.01) as rl:
        elsewhere = threading.Thread(target=lambda: [step(rl) for _ in range(3)])
        elsewhere.start()
        log.wait_for("optim_step", 2)
        assert log.count("optim_step") >= 2
        elsewhere.join()
    log.wait_for("start")
    with pytest.raises(TimeoutError, match=r"3 of 4 optim_step ended within 0\.1 s"):
        log.wait_for("optim_step", 4, timeout=0.1)


def test_the_backend_s_own_log_keeps_no_requests() -> None:
    """It holds 100000 records: with their batches it would fill the memory of a server."""
    log = CallLog()
    server = MockServer(calls=log)
    with server, connect(server.url) as rl:
        step(rl)
        backend = server.dispatcher.backend
        assert [call.operation for call in backend.calls] == [each.operation for each in log]
        assert not any(call.request for call in backend.calls)


def test_a_server_ends_with_its_block_and_tells_its_clients(tmp_path: Path) -> None:
    with MockServer(checkpoint_dir=tmp_path, latency={"generate": 60.0}) as server:
        rl = connect(server.url)
        assert server.driven
        rl.training.save("one").result()
        waiting = rl.sampling.generate([[1]], SamplingParams(max_tokens=1))
        server.calls.wait_for("generate", event="started")
    assert not server.driven
    with pytest.raises(RunLostError) as lost:
        waiting.result()
    assert lost.value.details["last_checkpoint"] == "one"
    rl.detach()
    server.stop()  # a second time does nothing


def test_the_profiles_differ_in_size_and_options_win() -> None:
    def parameters(**options: object) -> int:
        with MockServer(**options) as server, connect(server.url) as rl:
            return rl.info().result().model.parameters or 0

    fast, full = parameters(), parameters(profile="full")
    assert fast < parameters(hidden_size=128) < full
    with pytest.raises(InvalidRequestError, match="'huge'"):
        MockServer(profile="huge")


def test_a_backend_that_does_not_start_leaves_no_server_behind() -> None:
    def loops() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if each.name == "remote_rl client"}

    before = loops()
    with pytest.raises(BackendError):
        MockServer(faults=[fault("start")])
    assert loops() == before


def test_any_backend_can_be_served() -> None:
    from backends.mock import create

    server = LoopbackServer(create(seed=5))
    try:
        with connect(server.url) as rl:
            assert step(rl) > 0
    finally:
        server.stop()


def test_nothing_is_imported_with_the_package_until_a_name_is_used() -> None:
    """A pytest session that never uses the plug-in, and `--help`, don't pay for numpy."""
    script = "import sys, remote_rl, remote_rl.testing; print('numpy' in sys.modules, {})"
    names = "[getattr(remote_rl, name).__name__ for name in ('connect', 'Batch', 'errors')]"
    ran = subprocess.run(
        [sys.executable, "-c", script.format(names)], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "False ['connect', 'Batch', 'remote_rl.errors']"


@pytest.mark.parametrize("first", ["connect", "RunInfo", "OptimStepResult", "ByteTokenizer"])
def test_results_show_their_public_names_whatever_is_used_first(first: str) -> None:
    script = (
        f"from remote_rl import {first}; from remote_rl.types.results import OptimStepResult as r; "
        "import pickle; print(r.__module__, pickle.loads(pickle.dumps(r)) is r)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "remote_rl True"
    assert pickle.loads(pickle.dumps(remote_rl.SamplingParams)) is remote_rl.SamplingParams
