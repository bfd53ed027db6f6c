"""The public API as a strictly typed program uses it; checked by mypy and pyright, never run."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import numpy as np

from remote_rl import (
    AdamW,
    Batch,
    CheckpointInfo,
    Devices,
    Done,
    ExportReceipt,
    ForwardBackwardResult,
    GenerateOperation,
    Group,
    Handle,
    LoadResult,
    Operation,
    OptimStepResult,
    Outputs,
    Ragged,
    RunInfo,
    Sample,
    SamplingParams,
    Session,
    SyncReceipt,
    WeightsVersion,
    Work,
    connect,
    errors,
    losses,
    mfu,
)


def blocking(target: str) -> float:
    with connect(target, start="base", checkpoint_dir=Path("checkpoints")) as rl:
        assert_type(rl, Session)
        generate = rl.sampling.generate([[1, 2], [3]], SamplingParams(n=2, max_tokens=8, stop="x"))
        assert_type(generate, GenerateOperation)
        for sample in generate:
            assert_type(sample, Sample)
        groups = generate.result(timeout=10.0)
        assert_type(groups, tuple[Group, ...])
        batch = Batch.from_groups(groups, advantages=np.zeros(4))
        assert_type(batch, Batch)
        forward = rl.training.forward(batch, outputs={"logprobs", "entropy"}, policy="reference")
        assert_type(forward, Operation[Outputs])
        outputs = forward.result()
        assert_type(outputs.logprobs, Ragged)
        batch = batch.replace(ref_logprobs=outputs.logprobs)
        loss = losses.PPO(clip_low=0.2, clip_high=0.28, kl=losses.KL(coef=0.01), aggregation="sum")
        backward = rl.training.forward_backward(batch, loss)
        assert_type(backward, Operation[ForwardBackwardResult])
        step = rl.training.optim_step(AdamW(lr=1e-3, betas=(0.9, 0.95), max_grad_norm=1.0))
        assert_type(step, Operation[OptimStepResult])
        assert_type(rl.weights.sync(in_flight="wait", label=3), Operation[SyncReceipt])
        assert_type(rl.weights.push({"weight": np.zeros(3)}), Operation[SyncReceipt])
        assert_type(rl.weights.version(), Operation[WeightsVersion])
        assert_type(rl.training.save("a", {"step": 1}), Operation[CheckpointInfo])
        assert_type(rl.training.load("a", optimizer=False), Operation[LoadResult])
        assert_type(rl.training.checkpoints(), Operation[tuple[CheckpointInfo, ...]])
        assert_type(rl.training.export("hf"), Operation[ExportReceipt])
        assert_type(rl.training.zero_grad(), Operation[Done])
        assert_type(rl.info(), Operation[RunInfo])
        assert_type(rl.info().result().devices, Devices | None)
        assert_type(step.result().work, Work | None)
        assert_type(mfu(Work.total([step.result().work]), None), tuple[float | None, str | None])
        assert_type(rl.handle(), Handle)
        return step.result().grad_norm


async def awaiting(rl: Session, batch: Batch) -> Sample | None:
    result = await rl.training.forward_backward(batch, losses.CrossEntropy())
    assert_type(result, ForwardBackwardResult)
    try:
        await rl.training.optim_step(AdamW(lr=1e-3))
    except errors.DirtyGradientsError as error:
        assert_type(error.message, str)
        await rl.training.zero_grad()
    async for sample in rl.sampling.generate(Ragged.of([[1]]), SamplingParams(max_tokens=4)):
        assert_type(sample, Sample)
        return sample
    return None


def built(batch: Batch) -> Batch:
    own = Batch(
        prompts=[[1, 2, 3]],
        prompt_index=[0, 0],
        responses=[[4], [5, 6]],
        temperature=1.0,
        advantages=[[0.5], [0.5, -0.5]],
        extras={"uid": np.array([1, 2])},
    )
    assert_type(own.prompts, Ragged)
    assert_type(own.split(1), tuple[Batch, ...])
    return Batch.concat([own, batch.select([0])])
