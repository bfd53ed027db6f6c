"""The mock's files: a resume is the uninterrupted run bit by bit, and an export is safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mock_workload import Run, example_batch, running

from remote_rl import losses
from remote_rl.errors import ConflictError, InvalidRequestError
from remote_rl.types import AdamW


async def train(run: Run, seed: int) -> Any:
    loss = losses.CrossEntropy()
    await run.do("forward_backward", batch=example_batch(seed=seed), loss=loss)
    return await run.do("optim_step", optimizer=AdamW(lr=0.05))


async def save(run: Run, path: Path, **fields: Any) -> bool:
    result: bool = await run.do("save", context=run.context(directory=path), name="one", **fields)
    return result


async def load(run: Run, path: Path, **fields: Any) -> None:
    await run.do("load", context=run.context(directory=path), name="one", **fields)


async def policies(run: Run) -> list[Any]:
    batch = example_batch(seed=9)
    held = [await run.do("forward", batch=batch, policy=each) for each in ("current", "reference")]
    return [outputs.logprobs for outputs in held]


def test_resume_is_bit_identical(tmp_path: Path) -> None:
    @running
    async def check() -> None:
        straight, resumed = await Run().start(), await Run().start()
        for seed in range(3):
            await train(straight, seed)
            if seed == 0:
                await straight.do("set_reference", source="current")
        assert await save(straight, tmp_path / "state") is True
        await train(resumed, 77)
        await load(resumed, tmp_path / "state")
        assert resumed.version == 2
        for seed in range(3, 6):
            results = [await train(run, seed) for run in (straight, resumed)]
            assert results[0].grad_norm == results[1].grad_norm
        assert await policies(straight) == await policies(resumed)
        for name, array in straight.backend.training.policy.weights.items():
            assert np.array_equal(array, resumed.backend.training.policy.weights[name])

    check()


def test_without_the_optimizer_it_is_a_new_runs(tmp_path: Path) -> None:
    @running
    async def check() -> None:
        run = await Run().start()
        await train(run, 0)
        assert await save(run, tmp_path / "whole") is False
        await save(run, tmp_path / "bare", optimizer=False)
        results = []
        for path in ("whole", "bare"):
            other = await Run().start()
            await train(other, 5)
            await load(other, tmp_path / path, optimizer=False)
            outcome = await train(other, 1)
            assert outcome.metrics["optimizer_steps"] == 1
            results.append(await policies(other))
        assert results[0] == results[1]
        await train(run, 1)
        assert await policies(run) != results[0]

    check()


def test_a_load_clears_the_accumulator_and_leaves_the_sampler(tmp_path: Path) -> None:
    @running
    async def check() -> None:
        run, calm = await Run().start(), await Run().start()
        await save(run, tmp_path / "state")
        await run.do("forward_backward", batch=example_batch(), loss=losses.CrossEntropy())
        await load(run, tmp_path / "state")
        assert run.backend.sampler_version() == (0, None)
        assert (await train(run, 1)).grad_norm == (await train(calm, 1)).grad_norm

    check()


def test_the_reference_of_another_base_comes_along(tmp_path: Path) -> None:
    @running
    async def check() -> None:
        run, other = await Run(seed=1).start(), await Run(seed=2).start()
        await train(run, 0)
        assert await save(run, tmp_path / "state") is False
        await load(other, tmp_path / "state")
        assert await policies(other) == await policies(run)
        assert await save(other, tmp_path / "again") is True

    check()


def test_another_model_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    @running
    async def check() -> None:
        run, wider = await Run().start(), await Run(hidden_size=7).start()
        await save(run, tmp_path / "state")
        before = await policies(wider)
        with pytest.raises(InvalidRequestError, match=r"'model.window.weight' has shape \[6, 3, 4"):
            await load(wider, tmp_path / "state")
        assert await policies(wider) == before

    check()


def test_a_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    @running
    async def check() -> None:
        run = await Run().start()
        await save(run, tmp_path / "state")
        path = tmp_path / "state" / "weights.safetensors"
        whole = path.read_bytes()
        for length in (3, 40, len(whole) - 8):
            path.write_bytes(whole[:length])
            with pytest.raises(ConflictError, match=r"damaged .*cut short"):
                await load(run, tmp_path / "state")

    check()


def test_an_export_is_a_hugging_face_directory(tmp_path: Path) -> None:
    @running
    async def check() -> None:
        run = await Run(vocab_size=300, eos_token_ids=None).start()
        await run.do("export", context=run.context(directory=tmp_path / "state"), name="final")
        folder = tmp_path / "state"
        assert sorted(path.name for path in folder.iterdir()) == [
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer_config.json",
        ]
        config = json.loads((folder / "config.json").read_text())
        assert config["model_type"] == "remote_rl_mock"
        assert config["vocab_size"] == 300
        assert config["eos_token_id"] == [257]
        data = (folder / "model.safetensors").read_bytes()
        length = int.from_bytes(data[:8], "little")
        assert length % 8 == 0
        header = json.loads(data[8 : 8 + length])
        assert header.pop("__metadata__") == {"format": "pt"}
        weights = run.backend.training.policy.weights
        assert set(header) == set(weights)
        end = 0
        for name, entry in header.items():
            begin, end_of_this = entry["data_offsets"]
            assert (entry["dtype"], begin) == ("F64", end)
            end = end_of_this
            held = np.frombuffer(data[8 + length + begin : 8 + length + end], "<f8")
            assert np.array_equal(held.reshape(entry["shape"]), weights[name])
        assert len(data) == 8 + length + end

    check()


def test_the_safetensors_package_reads_it(tmp_path: Path) -> None:
    import safetensors.numpy as package

    @running
    async def check() -> None:
        run = await Run().start()
        await run.do("export", context=run.context(directory=tmp_path), name="final")
        arrays = package.load_file(tmp_path / "model.safetensors")
        weights = run.backend.training.policy.weights
        assert set(arrays) == set(weights)
        assert all(np.array_equal(arrays[name], weights[name]) for name in weights)

    check()
