"""Checkpoints on the mock: saving, listing, loading with and without optimizer, refusals."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_support import SessionFactory, learn, logprobs, small_mock

from remote_rl import AdamW, Batch, Session, losses
from remote_rl.errors import ConflictError, InvalidRequestError, RemoteRLError


def test_what_save_and_checkpoints_tell(mocked: Session, batch: Batch) -> None:
    before = time.time()
    learn(mocked, batch)
    metadata = {"step": 1, "note": "first", "list": [1, 2.5, None], "nested": {"a": True}}
    first = mocked.training.save("first", metadata).result()
    learn(mocked, batch)
    mocked.training.set_reference("current")
    second = mocked.training.save("second", optimizer=False).result()
    assert (first.name, first.version, first.optimizer, first.reference) == (
        "first",
        1,
        True,
        False,
    )
    assert first.metadata == metadata
    assert before <= first.created <= time.time()
    assert first.bytes > 1000
    assert (second.version, second.optimizer, second.reference) == (2, False, True)
    assert second.metadata == {}
    assert second.bytes < first.bytes  # no moments inside
    assert mocked.training.checkpoints().result() == (first, second)  # oldest first


def test_load_brings_everything_back(mocked: Session, batch: Batch) -> None:
    learn(mocked, batch, steps=2)
    mocked.training.set_reference("current")
    learn(mocked, batch)
    saved = logprobs(mocked, batch), logprobs(mocked, batch, "reference")
    mocked.training.save("a", {"epoch": 7}).result()
    learn(mocked, batch, steps=2)
    mocked.training.set_reference("base")
    loaded = mocked.training.load("a").result()
    assert (loaded.name, loaded.metadata, loaded.optimizer) == ("a", {"epoch": 7}, True)
    assert (loaded.saved_version, loaded.version) == (3, 6)  # max(current, saved) + 1
    assert (logprobs(mocked, batch), logprobs(mocked, batch, "reference")) == saved


def test_a_load_into_a_younger_run_numbers_above_the_saved(
    session_factory: SessionFactory, batch: Batch, tmp_path: Path
) -> None:
    old = session_factory(small_mock(), checkpoint_dir=tmp_path)
    learn(old, batch, steps=5)
    old.training.save("a").result()
    old.close()
    young = session_factory(small_mock(), checkpoint_dir=tmp_path)
    learn(young, batch)
    loaded = young.training.load("a").result()
    assert (loaded.saved_version, loaded.version) == (5, 6)
    assert young.weights.sync().result().version == 6


def goes_on(rl: Session, batch: Batch) -> Any:
    """Where two more steps lead: weights and optimizer state both show."""
    learn(rl, batch, steps=2)
    return logprobs(rl, batch)


def test_with_optimizer_the_run_goes_on_as_if_uninterrupted(mocked: Session, batch: Batch) -> None:
    learn(mocked, batch, steps=3)
    mocked.training.save("a").result()
    uninterrupted = goes_on(mocked, batch)
    mocked.training.load("a").result()
    assert goes_on(mocked, batch) == uninterrupted


def test_without_optimizer_it_is_fresh(
    session_factory: SessionFactory, batch: Batch, tmp_path: Path
) -> None:
    """As a new run's: the same as saving only weights and loading them into a new run."""
    rl = session_factory(small_mock(), checkpoint_dir=tmp_path)
    learn(rl, batch, steps=3)
    rl.training.save("with").result()
    rl.training.save("without", optimizer=False).result()
    warm = goes_on(rl, batch)
    results = []
    for name in ("with", "without"):
        assert rl.training.load(name, optimizer=False).result().optimizer is False
        results.append(goes_on(rl, batch))
    rl.close()
    other = session_factory(small_mock(), checkpoint_dir=tmp_path)
    other.training.load("without", optimizer=False).result()
    results.append(goes_on(other, batch))
    assert results[0] == results[1] == results[2]
    assert results[0] != warm


def test_a_checkpoint_without_optimizer_is_not_loaded_with_one(
    mocked: Session, batch: Batch
) -> None:
    mocked.training.save("a", optimizer=False).result()
    learn(mocked, batch)
    before = logprobs(mocked, batch)
    with pytest.raises(InvalidRequestError, match=r"'a' holds no optimizer state.*optimizer=False"):
        mocked.training.load("a").result()
    assert logprobs(mocked, batch) == before


def test_an_existing_name_is_refused(mocked: Session, batch: Batch) -> None:
    first = mocked.training.save("a", {"which": 1}).result()
    learn(mocked, batch)
    with pytest.raises(ConflictError, match="checkpoint 'a' exists"):
        mocked.training.save("a", {"which": 2}).result()
    assert mocked.training.checkpoints().result() == (first,)
    mocked.training.delete("a").result()
    assert mocked.training.checkpoints().result() == ()
    assert mocked.training.save("a").result().version == 1


def test_a_gradient_that_was_not_applied_is_refused(mocked: Session, batch: Batch) -> None:
    mocked.training.forward_backward(batch, losses.CrossEntropy())
    with pytest.raises(ConflictError, match=r"1 forward_backward\(s\) were not applied"):
        mocked.training.save("a").result()
    mocked.training.optim_step(AdamW(lr=0.1))
    assert mocked.training.save("a").result().name == "a"


def test_load_clears_accumulator_and_dirtiness(
    session_factory: SessionFactory, batch: Batch, tmp_path: Path
) -> None:
    backend = small_mock(faults={"operation": "forward_backward", "call": 2})
    rl = session_factory(backend, checkpoint_dir=tmp_path)
    rl.training.save("a").result()
    rl.training.forward_backward(batch, losses.CrossEntropy())
    failed = rl.training.forward_backward(batch, losses.CrossEntropy())
    with pytest.raises(RemoteRLError, match="fault"):
        failed.result()
    rl.training.load("a").result()
    with pytest.raises(ConflictError, match="nothing was accumulated"):
        rl.training.optim_step(AdamW(lr=0.1)).result()
    learn(rl, batch)


def test_unknown_checkpoints(mocked: Session) -> None:
    for call in (mocked.training.load("a"), mocked.training.delete("a")):
        with pytest.raises(InvalidRequestError, match="there is no checkpoint 'a'"):
            call.result()


def test_without_a_directory(session_factory: SessionFactory) -> None:
    rl = session_factory(small_mock())
    assert rl.info().result().checkpoint_dir is False
    assert rl.training.checkpoints().result() == ()
    for call in (rl.training.save("a"), rl.training.load("a"), rl.training.export("a")):
        with pytest.raises(InvalidRequestError, match="pass checkpoint_dir= to connect"):
            call.result()


def test_metadata_must_be_json(mocked: Session, batch: Batch) -> None:
    for wrong in ({"a": object()}, {"a": {1, 2}}, {"a": batch}, {1: "a"}):
        with pytest.raises(InvalidRequestError, match="metadata"):
            mocked.training.save("a", wrong)  # type: ignore[arg-type]
    assert mocked.training.checkpoints().result() == ()
    given = {"loss": float("inf"), "tuple": (1, 2), "scalar": np.float32(0.5), "text": "\u00fc\n"}
    held = {"loss": float("inf"), "tuple": [1, 2], "scalar": 0.5, "text": "\u00fc\n"}
    assert mocked.training.save("a", given).result().metadata == held
    assert mocked.training.load("a").result().metadata == held


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_save_that_fails_leaves_nothing(
    when: str, session_factory: SessionFactory, batch: Batch, tmp_path: Path
) -> None:
    backend = small_mock(faults={"operation": "save", "when": when})
    rl = session_factory(backend, checkpoint_dir=tmp_path)
    with pytest.raises(RemoteRLError, match="fault"):
        rl.training.save("a").result()
    assert rl.training.checkpoints().result() == ()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert rl.training.save("a").result().name == "a"


def test_a_checkpoint_of_another_model_is_refused(
    session_factory: SessionFactory, batch: Batch, tmp_path: Path
) -> None:
    with session_factory(small_mock(), checkpoint_dir=tmp_path) as rl:
        rl.training.save("a").result()
    other = session_factory(small_mock(hidden_size=16), checkpoint_dir=tmp_path)
    before = logprobs(other, batch)
    with pytest.raises(InvalidRequestError, match="the checkpoint is of another model"):
        other.training.load("a").result()
    assert logprobs(other, batch) == before


def test_an_export_is_removed_by_its_kind(mocked: Session, tmp_path: Path) -> None:
    mocked.training.save("final").result()
    mocked.training.export("final").result()
    with pytest.raises(ConflictError, match=r"first with training.delete\('final', kind='export'"):
        mocked.training.export("final").result()
    mocked.training.delete("final", kind="export").result()
    with pytest.raises(InvalidRequestError, match="no export 'final'"):
        mocked.training.delete("final", "export").result()
    assert [info.name for info in mocked.training.checkpoints().result()] == ["final"]
    mocked.training.export("final").result()
    with pytest.raises(InvalidRequestError, match="did you mean 'export'"):
        mocked.training.delete("final", "exprt")  # type: ignore[arg-type]
