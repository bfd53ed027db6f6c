"""The path of weights: staleness, versions and labels on samples, receipts, push."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from client_proofs import Lab, until_started
from client_support import SessionFactory, learn, logprobs, small_mock

from remote_rl import Batch, SamplingParams, Session, Tensor
from remote_rl.errors import BackendError, ConflictError, InvalidRequestError

FIXED = SamplingParams(n=3, max_tokens=6, seed=9)


def sampled(rl: Session) -> list[Any]:
    groups = rl.sampling.generate([[1], [2]], FIXED).result()
    return [sample.tokens.tolist() for group in groups for sample in group]


def versions(rl: Session) -> tuple[int, int | None, Any]:
    held = rl.weights.version().result()
    return held.trainer, held.sampler, held.label


def trainer_tensors(mock: Any) -> dict[str, np.ndarray[Any, Any]]:
    return {name: array.copy() for name, array in mock.training.policy.weights.items()}


def test_the_sampler_is_stale_until_the_sync(mocked: Session, batch: Batch) -> None:
    before = sampled(mocked)
    learn(mocked, batch, steps=5, lr=0.5)
    assert versions(mocked) == (5, 0, None)
    assert sampled(mocked) == before  # training alone does not reach it
    receipt = mocked.weights.sync(label="step 5").result()
    assert (receipt.version, receipt.label) == (5, "step 5")
    assert versions(mocked) == (5, 5, "step 5")
    assert sampled(mocked) != before


def test_after_a_sync_trainer_and_sampler_agree(mocked: Session, batch: Batch) -> None:
    """The sampler's logprobs are those of a forward at the same version, bit for bit."""
    learn(mocked, batch, steps=5, lr=0.5)
    mocked.weights.sync().result()
    groups = mocked.sampling.generate([[1], [2]], FIXED).result()
    forward = mocked.training.forward(Batch.from_groups(groups)).result()
    assert forward.version == 5
    samples = [sample for group in groups for sample in group]
    assert [list(row) for row in forward.logprobs] == [list(each.logprobs) for each in samples]  # type: ignore[arg-type]


def test_samples_carry_version_and_label(mocked: Session, batch: Batch) -> None:
    (first,) = mocked.sampling.generate([[1]], FIXED).result()
    learn(mocked, batch, steps=2)
    mocked.weights.sync(label=40).result()
    (second,) = mocked.sampling.generate([[1]], FIXED).result()
    assert {(s.first_version, s.last_version, s.first_label, s.label) for s in first} == {
        (0, 0, None, None)
    }
    assert {(s.first_version, s.last_version, s.first_label, s.label) for s in second} == {
        (2, 2, 40, 40)
    }
    both = Batch.from_groups([first, second])
    assert both.policy_version is not None
    assert both.policy_version.tolist() == [0, 0, 0, 2, 2, 2]


def test_a_generate_across_a_sync_has_both_versions(
    session_factory: SessionFactory, batch: Batch
) -> None:
    backend = small_mock()
    rl = session_factory(backend)
    rl.weights.sync(label="old").result()
    rl.sampling.pause().result()
    operation = rl.sampling.generate([[1]], SamplingParams(max_tokens=4))
    until_started(Lab(rl, backend), "generate")
    learn(rl, batch)
    rl.weights.sync("keep", label="new").result()
    assert not operation.done()
    rl.sampling.resume().result()
    ((sample,),) = operation.result(60)
    assert sample.last_version == 1
    assert sample.label == "new"
    assert len(sample) == 4
    assert sample.finish_reason == "length"


def test_sync_with_abort_ends_what_flies(session_factory: SessionFactory, batch: Batch) -> None:
    backend = small_mock()
    rl = session_factory(backend)
    rl.sampling.pause().result()
    operation = rl.sampling.generate([[1]], SamplingParams(max_tokens=4))
    until_started(Lab(rl, backend), "generate")
    learn(rl, batch)
    rl.weights.sync("abort").result(60)
    ((sample,),) = operation.result(60)
    assert (sample.finish_reason, sample.last_version) == ("abort", 0)
    rl.sampling.resume().result()


def test_sync_with_wait_lets_what_flies_finish(
    session_factory: SessionFactory, batch: Batch
) -> None:
    """Every token of it is of the old weights, though the sync came while it was being drawn."""
    backend = small_mock(latency={"token": 0.05})
    rl = session_factory(backend)
    operation = rl.sampling.generate([[1]], SamplingParams(max_tokens=6))
    until_started(Lab(rl, backend), "generate")
    learn(rl, batch)
    assert rl.weights.sync("wait").result(60).version == 1
    ((sample,),) = operation.result(60)
    assert (sample.finish_reason, sample.last_version, len(sample)) == ("length", 0, 6)
    ((after,),) = rl.sampling.generate([[1]], SamplingParams(max_tokens=1)).result()
    assert after.first_version == 1


def test_sync_with_wait_is_refused_while_generation_is_paused(mocked: Session) -> None:
    """It would wait for what nobody lets go on."""
    mocked.sampling.pause().result()
    with pytest.raises(ConflictError, match="generation is paused; resume first"):
        mocked.weights.sync("wait").result(60)
    mocked.sampling.resume().result()
    assert mocked.weights.sync("wait").result(60).version == 0


def test_the_receipt_says_what_moved(mocked: Session, mock: Any) -> None:
    receipt = mocked.weights.sync().result()
    weights = trainer_tensors(mock)
    assert receipt.tensors == len(weights) == 5
    assert receipt.bytes == sum(array.nbytes for array in weights.values())
    assert receipt.seconds >= 0
    assert receipt.source_fingerprint == receipt.sampler_fingerprint
    assert len(receipt.source_fingerprint) == 64


def test_a_failed_sync_leaves_the_old_version(
    session_factory: SessionFactory, batch: Batch
) -> None:
    rl = session_factory(small_mock(faults={"operation": "sync"}))
    before = sampled(rl)
    learn(rl, batch, steps=5, lr=0.5)
    with pytest.raises(BackendError, match="fault"):
        rl.weights.sync().result()
    assert versions(rl) == (5, 0, None)
    assert sampled(rl) == before
    assert rl.weights.sync().result().version == 5


# -- push ---------------------------------------------------------------------------------------


def test_push_changes_the_sampler_alone(mocked: Session, mock: Any, batch: Batch) -> None:
    before, trained = sampled(mocked), logprobs(mocked, batch)
    own = {name: array * 2 for name, array in trainer_tensors(mock).items()}
    receipt = mocked.weights.push(own, label="mine").result()
    assert (receipt.version, receipt.label, receipt.tensors) == (1, "mine", 5)
    assert receipt.bytes == sum(array.nbytes for array in own.values())
    assert receipt.source_fingerprint == receipt.sampler_fingerprint
    assert versions(mocked) == (0, 1, "mine")
    assert sampled(mocked) != before
    assert logprobs(mocked, batch) == trained
    learn(mocked, batch)
    assert versions(mocked)[0] == 2  # above the pushed one: a version never means two things


def test_push_of_the_trainers_own_weights_samples_alike(
    mocked: Session, mock: Any, batch: Batch
) -> None:
    learn(mocked, batch, steps=3, lr=0.5)
    mocked.weights.sync().result()
    synced = sampled(mocked)
    mocked.weights.push(trainer_tensors(mock)).result()
    assert sampled(mocked) == synced


def test_a_sync_of_older_weights_than_the_pushed_is_refused(
    mocked: Session, mock: Any, batch: Batch
) -> None:
    """A sampler's versions only rise."""
    mocked.weights.push(trainer_tensors(mock)).result()
    with pytest.raises(ConflictError, match=r"pushed weights of version 1.*of version 0 are older"):
        mocked.weights.sync().result()
    learn(mocked, batch)
    assert mocked.weights.sync().result().version == 2


def test_push_keeps_the_bits_of_each_dtype(mocked: Session, mock: Any) -> None:
    """The same numbers as float32 and as bfloat16 give the same samples."""
    drawn = []
    rng = np.random.default_rng(3)
    numbers = {
        name: (rng.integers(-64, 64, array.shape) / 32).astype(np.float32)
        for name, array in trainer_tensors(mock).items()
    }
    for dtype in ("float32", "bfloat16", "float64"):
        own: dict[str, Any] = {}
        for name, array in numbers.items():
            if dtype == "bfloat16":
                own[name] = Tensor(data=(array.view("<u4") >> 16).astype("<u2"), dtype=dtype)
            else:
                own[name] = array.astype(dtype)
        receipt = mocked.weights.push(own).result()
        drawn.append((sampled(mocked), receipt.source_fingerprint))
    assert drawn[0][0] == drawn[1][0] == drawn[2][0]
    assert len({fingerprint for _, fingerprint in drawn}) == 3  # which names the dtype


@pytest.mark.parametrize("problem", ["missing", "unknown", "shape", "not finite"])
def test_push_refuses_what_does_not_fit_and_changes_nothing(
    problem: str, mocked: Session, mock: Any
) -> None:
    before = sampled(mocked)
    own = {name: array * 2 for name, array in trainer_tensors(mock).items()}
    if problem == "missing":
        del own["lm_head.bias"]
        words = r"push lacks 'lm_head\.bias'"
    elif problem == "unknown":
        own["lm_head.biass"] = own["lm_head.bias"]
        words = r"no tensor 'lm_head\.biass'; did you mean 'lm_head\.bias'"
    elif problem == "shape":
        own["lm_head.bias"] = np.zeros(5)
        words = r"'lm_head\.bias' has shape \[5\]; the model's has \[12\]"
    else:
        own["lm_head.bias"][3] = np.nan
        words = r"'lm_head\.bias' holds NaN"
    with pytest.raises(InvalidRequestError, match=words):
        mocked.weights.push(own).result()
    assert versions(mocked) == (0, 0, None)
    assert sampled(mocked) == before


@pytest.mark.parametrize("wrong", [{}, [], {"w": "text"}, {"w": np.zeros(2, np.complex128)}])
def test_push_of_what_is_no_tensor_is_refused_at_the_call(mocked: Session, wrong: Any) -> None:
    with pytest.raises(InvalidRequestError):
        mocked.weights.push(wrong)


@pytest.mark.parametrize("label", [1.5, True, b"x", ("a",)])
def test_a_label_is_a_number_or_text(mocked: Session, label: Any) -> None:
    with pytest.raises(InvalidRequestError, match="label must be"):
        mocked.weights.sync(label=label)
