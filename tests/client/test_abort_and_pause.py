"""Ending and holding generates: by request id, all of them, pause and resume."""

from __future__ import annotations

from typing import Any

import pytest
from client_double import Double, Hold
from client_support import Doorkeeper, SessionFactory, small_mock

from remote_rl import Batch, SamplingParams, Session, losses
from remote_rl.errors import ConflictError, OperationCancelled
from remote_rl.messages import Submit

#: no generate of it ends by itself
SLOW = {"latency": {"token": 3600.0}}
PARAMS = SamplingParams(n=2, max_tokens=50)


def finish_reasons(operation: Any) -> list[str]:
    return [sample.finish_reason for group in operation.result(60) for sample in group]


@pytest.fixture
def slow(session_factory: SessionFactory) -> Session:
    return session_factory(small_mock(**SLOW))


def test_abort_by_request_id(rl: Session, double: Double) -> None:
    double.sample_holds = {1: Hold()}
    first, second = (rl.sampling.generate([[1]], PARAMS) for _ in range(2))
    assert double.sample_holds[1].reached.wait(60)
    rl.sampling.abort([first.request_id]).result(60)
    assert finish_reasons(first) == ["stop", "abort"]  # what had ended stays
    assert not second.done()
    double.sample_holds[1].open()
    assert finish_reasons(second) == ["stop", "stop"]


@pytest.mark.parametrize("form", ["id", "operation", "ids", "operations"])
def test_what_abort_takes(form: str, slow: Session) -> None:
    operation = slow.sampling.generate([[1]], PARAMS)
    other = slow.sampling.generate([[1]], PARAMS)
    one: Any = operation if form.startswith("operation") else operation.request_id
    slow.sampling.abort([one] if form.endswith("s") else one).result(60)
    assert finish_reasons(operation) == ["abort", "abort"]
    assert not other.done()
    slow.sampling.abort()
    assert finish_reasons(other) == ["abort", "abort"]


def test_abort_all(slow: Session) -> None:
    operations = [slow.sampling.generate([[1]], PARAMS) for _ in range(20)]
    slow.sampling.abort().result(60)
    assert [finish_reasons(operation) for operation in operations] == [["abort"] * 2] * 20


def test_abort_does_not_overtake_the_generates_before_it(
    slow: Session, doorkeeper: Doorkeeper
) -> None:
    """Messages have connections of their own: the abort must still find what came before it."""
    late = doorkeeper.keep(
        lambda message: isinstance(message, Submit) and message.operation == "generate"
    )
    operations = [slow.sampling.generate([[1]], PARAMS) for _ in range(3)]
    abort = slow.sampling.abort()
    by_id = slow.sampling.abort([operations[0]])
    slow.info().result(60)
    assert not abort.done()
    late.open()
    abort.result(60)
    by_id.result(60)
    assert [finish_reasons(operation) for operation in operations] == [["abort"] * 2] * 3


def test_a_generate_after_an_abort_is_untouched(rl: Session, double: Double) -> None:
    rl.sampling.abort().result()
    assert finish_reasons(rl.sampling.generate([[1]], PARAMS)) == ["stop", "stop"]


def test_an_aborted_sample_keeps_its_tokens(session_factory: SessionFactory, batch: Batch) -> None:
    """On the mock: some tokens were drawn, and the aborted sample is the beginning of the whole."""
    backend = small_mock(latency={"token": 0.002})
    rl = session_factory(backend)
    params = SamplingParams(n=2, max_tokens=4000, seed=7)
    operation = rl.sampling.generate([[1]], params)
    while operation.progress is None:
        with pytest.raises(TimeoutError):
            operation.result(0.02)
    rl.sampling.abort([operation]).result(60)
    aborted = operation.result()[0]
    assert {sample.finish_reason for sample in aborted} == {"abort"}
    assert 0 < len(aborted[0]) < 4000
    whole = session_factory(small_mock()).sampling.generate([[1]], params).result(60)[0]
    for cut, full in zip(aborted, whole):
        assert cut.tokens.tolist() == full.tokens[: len(cut)].tolist()
        assert cut.logprobs is not None
        assert full.logprobs is not None
        assert cut.logprobs.tolist() == full.logprobs[: len(cut)].tolist()


def test_an_abort_before_the_first_token_gives_an_empty_response_that_trains(
    slow: Session,
) -> None:
    operation = slow.sampling.generate([[1], [2]], PARAMS)
    slow.sampling.abort().result(60)
    groups = operation.result()
    assert [len(sample) for group in groups for sample in group] == [0, 0, 0, 0]
    empty = Batch.from_groups(groups, advantages=[1, 1, 1, 1])
    assert slow.training.forward_backward(empty, losses.PPO()).result().value == 0


def test_pause_holds_and_resume_lets_go(mocked: Session, mock: Any) -> None:
    mocked.sampling.pause().result()
    operation = mocked.sampling.generate([[1]], SamplingParams(max_tokens=3))
    for _ in range(20):  # time enough for three tokens
        mocked.info().result()
    assert ("generate", "started") in [(call.operation, call.event) for call in mock.calls]
    assert not operation.done()
    mocked.sampling.resume().result()
    assert len(operation.result(60)[0][0]) == 3


def test_an_abort_reaches_a_paused_generate(mocked: Session) -> None:
    mocked.sampling.pause().result()
    operation = mocked.sampling.generate([[1]], SamplingParams(max_tokens=3))
    mocked.sampling.abort().result(60)
    assert finish_reasons(operation) == ["abort"]
    mocked.sampling.resume().result()


def test_an_old_pause_that_arrives_late_is_answered_and_ignored(
    mocked: Session, mock: Any, doorkeeper: Doorkeeper
) -> None:
    late = doorkeeper.keep(
        lambda message: isinstance(message, Submit) and message.operation == "pause"
    )
    pause = mocked.sampling.pause()
    mocked.sampling.resume().result(60)
    late.open()
    pause.result(60)
    assert len(mocked.sampling.generate([[1]], SamplingParams(max_tokens=3)).result(60)) == 1
    assert "pause" not in [call.operation for call in mock.calls]


def test_every_control_reaches_the_backend(mocked: Session, mock: Any) -> None:
    mocked.sampling.pause().result()
    mocked.sampling.resume().result()
    mocked.sampling.reset_prefix_cache().result()
    mocked.sampling.finish_session("s").result()
    ended = [call.operation for call in mock.calls if call.event == "ended"]
    assert ended[1:] == ["pause", "resume", "reset_prefix_cache", "finish_session"]


def test_closing_while_paused_does_not_wait_for_ever(mocked: Session) -> None:
    mocked.sampling.pause().result()
    held = [mocked.sampling.generate([[1]], SamplingParams(max_tokens=3)) for _ in range(2)]
    with pytest.raises(ConflictError, match=r"2 generate\(s\) were cancelled; resume before"):
        mocked.close()
    for operation in held:
        with pytest.raises(OperationCancelled):
            operation.result()
