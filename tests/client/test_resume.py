"""A run that is interrupted and resumed gives the same bits as one that was not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from client_support import SessionFactory, small_mock

from remote_rl import AdamW, Batch, SamplingParams, Session, losses

PROMPTS = [[1, 2], [3]]
PARAMS = SamplingParams(n=3, max_tokens=6, temperature=0.8)  # no seed: the run derives one


def step(rl: Session, number: int) -> list[Any]:
    """One turn of a loop on policy, and everything that it saw."""
    groups = rl.sampling.generate(PROMPTS, PARAMS).result()
    rewards = [float(sample.tokens.sum() % 5) - 2 for group in groups for sample in group]
    batch = Batch.from_groups(groups, advantages=rewards)
    reference = rl.training.forward(batch, policy="reference").result()
    batch = batch.replace(ref_logprobs=reference.logprobs)
    result = rl.training.forward_backward(batch, losses.PPO(kl=losses.KL(0.1)))
    norm = rl.training.optim_step(AdamW(lr=0.05, weight_decay=0.1)).result().grad_norm
    rl.weights.sync(label=number).result()
    return [
        [sample.tokens.tolist() for group in groups for sample in group],
        [sample.logprobs.tolist() for group in groups for sample in group],  # type: ignore[union-attr]
        result.result().value,
        norm,
    ]


def exported(rl: Session, name: str) -> bytes:
    return (Path(rl.training.export(name).result().path) / "model.safetensors").read_bytes()


@pytest.mark.parametrize("in_place", [True, False], ids=["same session", "new run"])
def test_a_resumed_run_has_the_same_bits(
    in_place: bool, session_factory: SessionFactory, tmp_path: Path
) -> None:
    rl = session_factory(small_mock(), checkpoint_dir=tmp_path)
    for number in range(2):
        step(rl, number)
    rl.training.set_reference("current")
    rl.training.save("middle", {"next": 2}).result()
    uninterrupted = [step(rl, number) for number in (2, 3)]
    weights = exported(rl, "uninterrupted")

    if not in_place:
        rl.close()
        rl = session_factory(small_mock(), checkpoint_dir=tmp_path)
    first = rl.training.load("middle").result().metadata["next"]
    rl.weights.sync(label=first - 1).result()
    resumed = [step(rl, number) for number in range(first, first + 2)]
    assert resumed == uninterrupted
    assert exported(rl, "resumed") == weights


def test_without_the_load_it_would_differ(session_factory: SessionFactory, tmp_path: Path) -> None:
    """What the test above compares does depend on weights, optimizer, reference and seeds."""
    rl = session_factory(small_mock(), checkpoint_dir=tmp_path)
    first, second = step(rl, 0), step(rl, 1)
    assert first[0] != second[0]
    rl.training.save("a").result()
    with_optimizer = step(rl, 2)
    rl.training.load("a", optimizer=False)
    rl.weights.sync().result()
    without = step(rl, 2)
    assert (
        with_optimizer[:3] == without[:3]
    )  # the same samples, and the gradient at the same weights
    assert step(rl, 3)[0] != with_optimizer[0]


def test_unseeded_generates_draw_anew_each_time_and_alike_in_each_run(
    session_factory: SessionFactory,
) -> None:
    def drawn(seed: int) -> list[Any]:
        rl = session_factory(small_mock(seed=seed))
        groups = [rl.sampling.generate([[1]], PARAMS) for _ in range(4)]
        return [
            [sample.tokens.tolist() for sample in operation.result()[0]] for operation in groups
        ]

    run = drawn(0)
    assert len({repr(group) for group in run}) == 4
    assert drawn(0) == run
    assert drawn(1) != run


def test_seeds_go_on_after_generates_that_are_still_running_at_the_save(
    session_factory: SessionFactory, tmp_path: Path
) -> None:
    """The counter counts generates when they are submitted, so pipelining does not move it."""
    rl = session_factory(small_mock(), checkpoint_dir=tmp_path)
    before = [rl.sampling.generate([[1]], PARAMS) for _ in range(3)]
    for operation in before:
        operation.result()
    rl.training.save("a").result()
    expected = [
        sample.tokens.tolist() for sample in rl.sampling.generate([[1]], PARAMS).result()[0]
    ]
    rl.training.load("a").result()
    again = [sample.tokens.tolist() for sample in rl.sampling.generate([[1]], PARAMS).result()[0]]
    assert again == expected


def test_seeded_generates_do_not_depend_on_the_counter(session_factory: SessionFactory) -> None:
    params = SamplingParams(n=2, max_tokens=6, seed=11)
    rl = session_factory(small_mock())
    first = rl.sampling.generate([[1]], params).result()
    rl.sampling.generate([[1]], PARAMS).result()
    assert rl.sampling.generate([[1]], params).result() == first
