"""Weights on their way to the mock's sampler, and generates that are in flight meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from mock_workload import Run, example_batch, running, until

from backends.mock.weights import decoded
from remote_rl import losses
from remote_rl.errors import InvalidRequestError
from remote_rl.types import AdamW, Sample, Tensor
from remote_rl.types.results import TENSOR_DTYPES

SLOW = {"latency": {"token": 0.005}, "eos_token_ids": ()}


async def train(run: Run, lr: float = 0.1) -> Any:
    await run.do("forward_backward", batch=example_batch(), loss=losses.CrossEntropy())
    return await run.do("optim_step", optimizer=AdamW(lr=lr))


def versions(sample: Sample) -> tuple[int, int]:
    return sample.first_version, sample.last_version


# -- sync -----------------------------------------------------------------------------------------


@running
async def test_the_sampler_is_stale_until_a_sync() -> None:
    run = await Run().start()
    before = await run.generate([[1]], n=8, max_tokens=4, seed=1)
    assert versions(before[0]) == (0, 0)
    result = await train(run)
    assert (result.version, result.skipped) == (1, False)
    assert await run.generate([[1]], n=8, max_tokens=4, seed=1) == before
    receipt = await run.do("sync", label=17)
    assert (receipt.version, receipt.label, receipt.tensors) == (1, 17, 5)
    assert receipt.source_fingerprint == receipt.sampler_fingerprint
    assert receipt.bytes == 8 * run.backend.model.parameters
    assert run.backend.sampler_version() == (1, 17)
    after = await run.generate([[1]], n=8, max_tokens=4, seed=1)
    assert versions(after[0]) == (1, 1)
    assert after[0].label == 17
    assert [s.logprobs.tolist() for s in after] != [s.logprobs.tolist() for s in before]


@running
async def test_keep_goes_on_with_the_new_weights_from_the_next_token() -> None:
    run = await Run(**SLOW).start()
    task, context = run.begin([[1]], max_tokens=100_000)
    await until(lambda: len(context.signs) >= 5)
    await train(run)
    await run.do("sync", in_flight="keep", label="fresh")
    later = len(context.signs) + 3
    await until(lambda: len(context.signs) >= later)
    context.abort_signal.set()
    (sample,) = await task
    assert versions(sample) == (0, 1)
    assert sample.label == "fresh"


@running
async def test_wait_lets_what_flies_end_first_and_holds_what_comes() -> None:
    run = await Run(**SLOW).start()
    await train(run)
    task, context = run.begin([[1]], max_tokens=100)
    await until(lambda: len(context.signs) >= 2)
    waiting = run.context()
    sync = asyncio.create_task(run.do("sync", context=waiting, in_flight="wait"))
    await until(lambda: bool(waiting.signs))
    late, _ = run.begin([[1]], max_tokens=2)
    receipt = await sync
    assert task.done()
    assert versions((await task)[0]) == (0, 0)
    assert versions((await late)[0]) == (1, 1)
    assert receipt.version == 1


@running
async def test_abort_ends_what_flies_with_the_tokens_so_far() -> None:
    run = await Run(**SLOW).start()
    task, context = run.begin([[1]], max_tokens=10_000)
    await until(lambda: len(context.signs) >= 3)
    await train(run)
    await run.do("sync", in_flight="abort")
    (sample,) = await task
    assert sample.finish_reason == "abort"
    assert 3 <= len(sample) < 10_000
    assert len(sample.logprobs) == len(sample)
    assert versions(sample) == (0, 0)


@running
async def test_wait_reports_life_while_generation_is_paused() -> None:
    run = await Run(**SLOW).start()
    task, _ = run.begin([[1]], max_tokens=3)
    await run.do("pause")
    context = run.context()
    sync = asyncio.create_task(run.do("sync", context=context, in_flight="wait"))
    await until(lambda: bool(context.signs))
    assert "waiting for 1 generates to end, paused" in context.signs[0][2]
    assert not sync.done()
    await run.do("resume")
    await sync
    assert task.done()


# -- abort, pause, emission -----------------------------------------------------------------------


@running
async def test_an_abort_keeps_finished_samples_and_cuts_the_others() -> None:
    run = await Run(latency={"token": 0.002}).start()
    task, context = run.begin([[1], [2]], n=20, max_tokens=10_000, temperature=3.0)
    await until(lambda: len(context.emitted) >= 10)
    context.abort_signal.set()
    samples = await task
    reasons = [sample.finish_reason for sample in samples]
    assert reasons.count("stop") >= 10
    assert len(context.emitted) == 40
    order = [(sample.prompt_index, sample.index) for sample in samples]
    assert order == [(prompt, index) for prompt in range(2) for index in range(20)]
    emitted = {(s.prompt_index, s.index): s for s in context.emitted}
    assert [emitted[key] for key in order] == samples


@running
async def test_an_abort_before_the_first_token_gives_empty_responses() -> None:
    run = await Run().start()
    await run.do("pause")
    task, context = run.begin([[1]], n=2, max_tokens=5)
    await asyncio.sleep(0.02)
    assert not task.done()
    context.abort_signal.set()
    samples = await task
    assert [(len(sample), sample.finish_reason) for sample in samples] == [(0, "abort")] * 2
    assert versions(samples[0]) == (0, 0)


@running
async def test_an_abort_cuts_latency_short() -> None:
    run = await Run(latency={"generate": 3600}).start()
    task, context = run.begin([[1]], max_tokens=5)
    await until(lambda: bool(context.slept))
    context.abort_signal.set()
    assert (await task)[0].finish_reason == "abort"


@running
async def test_pause_holds_at_the_next_token_and_resume_goes_on() -> None:
    run = await Run(**SLOW).start()
    reference = await run.generate([[1]], max_tokens=60, seed=7)
    task, context = run.begin([[1]], max_tokens=60, seed=7)
    await until(lambda: len(context.signs) >= 3)
    await run.do("pause")
    held = len(context.signs) + 1  # the token that was being drawn
    await asyncio.sleep(0.2)
    assert len(context.signs) <= held
    held = len(context.signs)
    await train(run)
    await run.do("sync")
    await run.do("resume")
    (sample,) = await task
    assert versions(sample) == (0, 1)
    assert sample.tokens[:held].tolist() == reference[0].tokens[:held].tolist()


# -- push -----------------------------------------------------------------------------------------


def held(run: Run) -> dict[str, np.ndarray]:
    return dict(run.backend.training.policy.weights)


@running
async def test_a_push_is_served_under_the_next_version_and_leaves_the_trainer() -> None:
    run = await Run().start()
    receipt = await run.do("push", tensors={n: a * 2 for n, a in held(run).items()}, label="mine")
    assert (receipt.version, receipt.label) == (1, "mine")
    assert receipt.source_fingerprint == receipt.sampler_fingerprint
    (sample,) = await run.generate([[1]], max_tokens=2)
    assert versions(sample) == (1, 1)
    outputs = await run.do("forward", batch=example_batch())
    assert outputs.version == 0
    assert (await train(run)).version == 2


@running
async def test_pushing_the_trainers_weights_is_a_sync() -> None:
    run = await Run().start()
    await train(run)
    synced_receipt = await run.do("sync")
    synced = await run.generate([[1]], n=4, max_tokens=4, seed=1)
    receipt = await run.do("push", tensors=held(run))
    pushed = await run.generate([[1]], n=4, max_tokens=4, seed=1)
    assert receipt.sampler_fingerprint == synced_receipt.sampler_fingerprint
    assert [s.logprobs.tolist() for s in pushed] == [s.logprobs.tolist() for s in synced]


@running
async def test_a_wrong_push_is_refused_by_name_and_changes_nothing() -> None:
    run = await Run().start()
    before = await run.generate([[1]], n=4, max_tokens=4, seed=1)
    good = held(run)
    name = "lm_head.bias"
    wrong = [
        ({n: a for n, a in good.items() if n != name}, r"push lacks 'lm_head.bias'"),
        (good | {"lm_head.bia": good[name]}, r"no tensor 'lm_head.bia'; did you mean 'lm_head"),
        (
            good | {name: good[name][:-1]},
            r"'lm_head.bias' has shape \[12\]; the model's has",
        ),
        (good | {name: np.full(13, np.nan)}, r"'lm_head.bias' holds NaN"),
        (good | {name: np.full(13, 2**60 + 1)}, r"'lm_head.bias' holds whole numbers beyond"),
    ]
    for tensors, message in wrong:
        with pytest.raises(InvalidRequestError, match=message):
            await run.do("push", tensors=tensors)
    assert run.backend.sampler_version() == (0, None)
    assert await run.generate([[1]], n=4, max_tokens=4, seed=1) == before


@running
async def test_fingerprints_tell_dtypes_apart() -> None:
    run = await Run().start()
    wide = await run.do("push", tensors=held(run))
    narrow = {name: array.astype(np.float32) for name, array in held(run).items()}
    single = await run.do("push", tensors=narrow)
    assert single.bytes * 2 == wide.bytes
    assert single.sampler_fingerprint != wide.sampler_fingerprint


def bits(dtype: str, *patterns: int) -> list[float]:
    storage = np.dtype(TENSOR_DTYPES[dtype])
    unsigned = np.array(patterns, f"<u{storage.itemsize}")
    return decoded(Tensor(data=unsigned.view(storage), dtype=dtype)).tolist()


def test_known_bit_patterns() -> None:
    assert bits("bfloat16", 0x3F80, 0xC000, 0x3DCD, 0x0001, 0x7F7F) == [
        1.0,
        -2.0,
        0.10009765625,
        2.0**-133,
        float.fromhex("0x1.FEp127"),
    ]
    assert bits("float8_e4m3fn", 0x38, 0xB8, 0x7E, 0x08, 0x01, 0x07, 0x00, 0x80) == [
        1.0,
        -1.0,
        448.0,
        2.0**-6,
        2.0**-9,
        7 * 2.0**-9,
        0.0,
        -0.0,
    ]
    assert bits("float8_e5m2", 0x3C, 0xC0, 0x7B, 0x04, 0x01, 0x03) == [
        1.0,
        -2.0,
        57344.0,
        2.0**-14,
        2.0**-16,
        3 * 2.0**-16,
    ]
    assert bits("float16", 0x3C00, 0x7BFF, 0x0001) == [1.0, 65504.0, 2.0**-24]
    assert bits("float32", 0x3F800000, 0x3DCCCCCD) == [1.0, float(np.float32(0.1))]
    assert bits("float64", 0x3FB999999999999A) == [0.1]
    assert bits("int8", 0xFF) == [-1.0]
    assert bits("int16", 0x8000) == [-32768.0]
    assert bits("int32", 0x7FFFFFFF) == [2.0**31 - 1]
    assert bits("int64", 2**53) == [2.0**53]
    assert bits("uint8", 255) == [255.0]
    assert bits("bool", 1, 0) == [1.0, 0.0]
    assert np.isnan(bits("float8_e4m3fn", 0x7F, 0xFF)).all()
    assert np.isinf(bits("float8_e5m2", 0x7C, 0xFC)).all()
    assert np.isnan(bits("bfloat16", 0x7FC0, 0x7F81)).all()


def test_every_dtype_has_a_pattern_above() -> None:
    import inspect

    source = inspect.getsource(test_known_bit_patterns)
    assert all(f'"{dtype}"' in source for dtype in TENSOR_DTYPES)


@running
async def test_a_failed_delivery_leaves_the_old_version() -> None:
    run = await Run(**SLOW).start()
    task, context = run.begin([[1]], max_tokens=10_000)
    await until(lambda: len(context.signs) >= 2)
    await train(run)
    waiting = run.context()
    sync = asyncio.create_task(run.do("sync", context=waiting, in_flight="wait"))
    await until(lambda: bool(waiting.signs))
    sync.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sync
    assert run.backend.sampler_version() == (0, None)
    late, _ = run.begin([[1]], max_tokens=2)
    assert versions((await late)[0]) == (0, 0)
    context.abort_signal.set()
    await task
