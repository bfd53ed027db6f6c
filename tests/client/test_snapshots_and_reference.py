"""Snapshots, the reference policy, versions of the trainer and reset, on the mock."""

from __future__ import annotations

from pathlib import Path

import pytest
from client_support import SessionFactory, learn, logprobs, small_mock

from remote_rl import AdamW, Batch, SamplingParams, Session, losses
from remote_rl.errors import ConflictError, InvalidRequestError


def test_a_snapshot_is_the_policy_of_its_moment(mocked: Session, batch: Batch) -> None:
    before = logprobs(mocked, batch)
    mocked.training.snapshot("start")
    learn(mocked, batch)
    after = logprobs(mocked, batch)
    assert after != before
    assert logprobs(mocked, batch, "start") == before
    assert logprobs(mocked, batch) == after


def test_restore_brings_weights_back_under_a_new_version(mocked: Session, batch: Batch) -> None:
    before = logprobs(mocked, batch)
    mocked.training.snapshot("start")
    learn(mocked, batch, steps=3)
    restored = mocked.training.restore_snapshot("start").result()
    assert restored.version == 4  # not 0, the version that it was taken at
    assert logprobs(mocked, batch) == before
    assert mocked.weights.version().result().trainer == 4


def test_restore_clears_the_accumulator(mocked: Session, batch: Batch) -> None:
    mocked.training.snapshot("start")
    mocked.training.forward_backward(batch, losses.CrossEntropy())
    mocked.training.restore_snapshot("start")
    with pytest.raises(ConflictError, match="nothing was accumulated"):
        mocked.training.optim_step(AdamW(lr=0.1)).result()


def test_drop_forgets_it(mocked: Session, batch: Batch) -> None:
    mocked.training.snapshot("a").result()
    mocked.training.drop_snapshot("a").result()
    for call in (
        mocked.training.restore_snapshot("a"),
        mocked.training.drop_snapshot("a"),
        mocked.training.set_reference("a"),
        mocked.training.forward(batch, policy="a"),
    ):
        with pytest.raises(InvalidRequestError, match="no snapshot 'a'"):
            call.result()
    mocked.training.snapshot("a").result()  # the name is free again


def test_a_name_that_is_taken_is_refused(mocked: Session, batch: Batch) -> None:
    mocked.training.snapshot("a").result()
    with pytest.raises(ConflictError, match="snapshot 'a' already"):
        mocked.training.snapshot("a").result()


@pytest.mark.parametrize("name", ["base", "current", "reference", "", "../up", "a b", ".hidden"])
def test_names_that_are_none(name: str, mocked: Session) -> None:
    for call in (
        mocked.training.snapshot,
        mocked.training.restore_snapshot,
        mocked.training.save,
        mocked.training.load,
        mocked.training.export,
        mocked.training.delete,
    ):
        with pytest.raises(InvalidRequestError, match="a name has 1 to 128"):
            call(name)


def test_the_reference_is_the_base_until_it_is_set(mocked: Session, batch: Batch) -> None:
    base = logprobs(mocked, batch)
    learn(mocked, batch)
    assert logprobs(mocked, batch, "reference") == base
    one = logprobs(mocked, batch)
    mocked.training.snapshot("one")
    learn(mocked, batch)
    two = logprobs(mocked, batch)

    mocked.training.set_reference("current")
    assert logprobs(mocked, batch, "reference") == two
    mocked.training.set_reference("one")
    assert logprobs(mocked, batch, "reference") == one
    mocked.training.drop_snapshot("one")
    learn(mocked, batch)
    assert logprobs(mocked, batch, "reference") == one  # it is weights, not a name
    mocked.training.set_reference("base")
    assert logprobs(mocked, batch, "reference") == base


def test_reference_logprobs_are_for_the_kl(mocked: Session, batch: Batch) -> None:
    """The usual loop: with policy and reference equal, every KL is 0."""
    reference = mocked.training.forward(batch, policy="reference").result()
    with_reference = batch.replace(ref_logprobs=reference.logprobs)
    loss = losses.Reinforce(kl=losses.KL(1.0), scale=1.0)
    zero = with_reference.replace(advantages=0 * batch.temperature)
    assert mocked.training.forward_backward(zero, loss).result().value == pytest.approx(0, abs=1e-6)


def test_versions_rise_with_every_change_and_never_repeat(mocked: Session, batch: Batch) -> None:
    seen = [mocked.weights.version().result().trainer]
    mocked.training.snapshot("a")
    for _ in range(2):
        mocked.training.forward_backward(batch, losses.CrossEntropy())
        seen.append(mocked.training.optim_step(AdamW(lr=0.1)).result().version)
    seen.append(mocked.training.restore_snapshot("a").result().version)
    mocked.training.save("c")
    seen.append(mocked.training.load("c").result().version)
    seen.append(mocked.reset().result().version)
    assert seen == [0, 1, 2, 3, 4, 5]


def test_results_name_the_version_they_used(mocked: Session, batch: Batch) -> None:
    learn(mocked, batch, steps=2)
    assert mocked.training.forward(batch).result().version == 2
    assert mocked.training.forward(batch, policy="reference").result().version == 0
    assert mocked.training.forward_backward(batch, losses.CrossEntropy()).result().version == 2


def test_reset_is_a_new_run(session_factory: SessionFactory, batch: Batch, tmp_path: Path) -> None:
    """Weights, optimizer, reference, snapshots and the seeds of unseeded generates."""
    params = SamplingParams(n=2, max_tokens=6)

    def life(rl: Session) -> list[object]:
        learn(rl, batch, steps=2)
        rl.weights.sync()
        rl.training.set_reference("current").result()
        groups = rl.sampling.generate([[1]], params).result()
        return [
            logprobs(rl, batch),
            logprobs(rl, batch, "reference"),
            [sample.tokens.tolist() for sample in groups[0]],
        ]

    fresh = life(session_factory(small_mock()))
    rl = session_factory(small_mock(), checkpoint_dir=tmp_path)
    rl.training.snapshot("a")
    assert life(rl) == fresh
    rl.training.forward_backward(batch, losses.CrossEntropy())
    rl.reset().result()
    with pytest.raises(InvalidRequestError, match="no snapshot 'a'"):
        rl.training.restore_snapshot("a").result()
    assert logprobs(rl, batch, "reference") == logprobs(session_factory(small_mock()), batch)
    served = rl.weights.version().result()
    assert served.sampler == served.trainer  # the sampler too
    assert life(rl) == fresh


def test_set_reference_is_part_of_pristine(mocked: Session, batch: Batch) -> None:
    assert mocked.info().result().pristine
    logprobs(mocked, batch)
    mocked.sampling.generate([[1]], SamplingParams(max_tokens=1)).result()
    mocked.weights.sync().result()
    assert mocked.info().result().pristine  # nothing of it has changed the run
    mocked.training.set_reference("current").result()
    assert not mocked.info().result().pristine
    mocked.reset().result()
    assert mocked.info().result().pristine
    learn(mocked, batch)
    assert not mocked.info().result().pristine
