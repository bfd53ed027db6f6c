"""Options of the arctic backend: what they refuse, and that the documentation has all of them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import attrs
import pytest

from backends.arctic.config import (
    ArcticConfig,
    LoraConfig,
    ModelConfig,
    PlacementConfig,
    SamplingConfig,
    TrainingConfig,
    WeightsConfig,
)
from backends.arctic.engine_factory import environment, way_of, with_device
from remote_rl import connect
from remote_rl.errors import InvalidRequestError, UnknownNameError

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "arctic.md"
EXAMPLES = sorted((ROOT / "examples").rglob("*.toml"))
SECTIONS = {
    "At the top": ArcticConfig,
    "`[model]`": ModelConfig,
    "`[training]`": TrainingConfig,
    "`[training.lora]`": LoraConfig,
    "`[sampling]`": SamplingConfig,
    "`[weights]`": WeightsConfig,
    "`[placement]`": PlacementConfig,
}
TABLES = {"training", "sampling", "weights", "placement"}


def rows(section: str) -> dict[str, str]:
    """Key to default, of one table of the page."""
    text = PAGE.read_text().partition(f"### {section}\n")[2].partition("\n#")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", text, re.MULTILINE))


@pytest.mark.parametrize("section", SECTIONS)
def test_the_page_has_every_key_and_its_default(section: str) -> None:
    fields = {field.name: field for field in attrs.fields(SECTIONS[section])}
    found = rows(section)
    assert set(found) == set(fields) - (TABLES if section == "At the top" else set())
    for name, shown in found.items():
        default = fields[name].default
        if isinstance(default, bool):
            assert shown == str(default).lower()
        elif isinstance(default, (int, float)):
            assert shown == str(default), name
        elif isinstance(default, str):
            assert shown == f'"{default}"', name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trainig": {}}, "ArcticConfig has no field 'trainig'; did you mean 'training'"),
        ({"training": {"rank": 2}}, "TrainingConfig has no field 'rank'; did you mean 'ranks'"),
        ({"training": {"lora": {"r": 8}}}, "LoraConfig has no field 'r'"),
        ({"sampling": {"engins": 2}}, "SamplingConfig has no field 'engins'"),
        ({"model": {"path": "x", "revision": "main"}}, "ModelConfig has no field 'revision'"),
    ],
)
def test_unknown_keys_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownNameError, match=re.escape(message)):
        ArcticConfig(**{"model": "x", **options})


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"model": None}, "model"),
        ({"model": {"path": ""}}, "path"),
        ({"training": 3}, "training"),
        ({"training": {"ranks": 0}}, "ranks"),
        ({"training": {"zero_stage": 4}}, "zero_stage"),
        ({"training": {"zero_stage": 1}, "model": {"path": "x", "dtype": "bfloat16"}}, "dtype"),
        ({"model": {"path": "x", "dtype": "float64"}}, "dtype"),
        ({"sampling": {"memory_fraction": 1.5}}, "memory_fraction"),
        ({"weights": {"path": "disk"}}, "path"),
        ({"placement": {"device": "tpu"}}, "device"),
        ({"weights": {"patience": 0}}, "patience"),
        ({"placement": {"device": "cpu"}, "weights": {"path": "cuda_ipc"}}, "weights.path"),
        ({"placement": {"device": "cpu"}, "weights": {"path": "nccl"}}, "weights.path"),
        ({"placement": {"device": "cuda", "colocated": True}, "weights": {"path": "nccl"}},
         "weights.path"),
        ({"placement": {"device": "cuda"}, "weights": {"path": "cuda_ipc"}}, "weights.path"),
        ({"placement": {"device": "cuda", "colocated": True}, "sampling": {"engines": 2},
          "weights": {"path": "cuda_ipc"}}, "weights.path"),
        ({"placement": {"device": "cpu", "colocated": True}}, "placement.colocated"),
        ({"placement": {"device": "cpu"}, "sampling": {"tensor_parallel": 2}},
         "sampling.tensor_parallel"),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ArcticConfig(**{"model": "x", **options})
    assert caught.value.details["field"] == field


def test_there_are_examples_of_both_placements() -> None:
    placements = {_of(example).placement.colocated for example in EXAMPLES}
    assert placements == {True, False}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: each.stem)
def test_every_example_s_configuration_is_legal(example: Path) -> None:
    config = _of(example)
    limit = config.model.context_length
    assert limit is None or config.training.token_budget >= limit


def _of(example: Path) -> ArcticConfig:
    return ArcticConfig(**tomllib.loads(example.read_text(encoding="utf-8")))


def test_a_path_is_enough_of_a_model(tmp_path: Path) -> None:
    assert ArcticConfig(model=tmp_path).model == ModelConfig(path=str(tmp_path))


@pytest.mark.parametrize("model", ["/no/such", Path("/no/such"), {"path": "/no/such"}], ids=repr)
def test_connect_makes_the_backend_with_the_model(
    monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    monkeypatch.setattr("backends.arctic.backend.check_packages", lambda: None)
    with pytest.raises(InvalidRequestError, match="'/no/such' is no directory here"):
        connect("arctic", model=model)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder that stands for /dev, of a machine without GPUs."""
    monkeypatch.setattr("backends.arctic.engine_factory._DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def add_gpus(machine: Path, count: int) -> None:
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(count))):
        (machine / name).touch()


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_gpus_that_are_there_are_taken(machine: Path, device: str) -> None:
    add_gpus(machine, 2)
    config = with_device(ArcticConfig(model="x", placement={"device": device}))
    assert config.placement.device == "cuda"


def test_without_gpus_it_is_a_cpu(machine: Path) -> None:
    assert with_device(ArcticConfig(model="x")).placement.device == "cpu"


@pytest.mark.parametrize(
    "options",
    [
        {"weights": {"path": "cuda_ipc"}, "placement": {"colocated": True}},
        {"sampling": {"tensor_parallel": 2}},
        {"placement": {"colocated": True}},
    ],
)
def test_what_needs_gpus_is_refused_where_auto_finds_none(
    machine: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequestError, match="needs GPUs"):
        with_device(ArcticConfig(model="x", **options))


@pytest.mark.parametrize(
    ("gpus", "options", "counts"),
    [
        (0, {"placement": {"device": "cuda"}}, "come to 2 GPUs, and this machine shows 0"),
        (1, {}, "come to 2 GPUs, and this machine shows 1"),
        (3, {"sampling": {"tensor_parallel": 3}}, "come to 4 GPUs, and this machine shows 3"),
        (1, {"placement": {"colocated": True}, "training": {"ranks": 2}}, "come to 2 GPUs"),
    ],
)
def test_gpus_that_are_not_there_are_counted_before_anything_starts(
    machine: Path, gpus: int, options: dict[str, Any], counts: str
) -> None:
    if gpus:
        add_gpus(machine, gpus)
    with pytest.raises(InvalidRequestError, match=counts):
        with_device(ArcticConfig(model="x", **options))


@pytest.mark.parametrize(
    ("options", "way"),
    [
        ({"placement": {"device": "cpu"}}, "shared_memory"),
        ({"placement": {"device": "cuda"}}, "shared_memory"),
        ({"placement": {"device": "cuda", "colocated": True}}, "cuda_ipc"),
        ({"placement": {"device": "cuda", "colocated": True}, "training": {"ranks": 2}},
         "cuda_ipc"),
        ({"placement": {"device": "cuda", "colocated": True}, "sampling": {"engines": 2}},
         "shared_memory"),
        ({"placement": {"device": "cuda", "colocated": True},
          "weights": {"path": "shared_memory"}}, "shared_memory"),
        ({"placement": {"device": "cpu"}, "weights": {"path": "gloo"}}, "gloo"),
        ({"placement": {"device": "cuda"}, "weights": {"path": "nccl"}}, "nccl"),
        ({"placement": {"device": "cuda", "colocated": True}, "weights": {"path": "gloo"}},
         "gloo"),
    ],
)  # fmt: skip
def test_which_way_a_sync_takes(options: dict[str, Any], way: str) -> None:
    assert way_of(ArcticConfig(model="x", **options)) == way


def test_hidden_gpus_do_not_count(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_gpus(machine, 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(InvalidRequestError, match="shows 1"):
        with_device(ArcticConfig(model="x"))


def test_a_cluster_s_gpus_may_be_elsewhere(machine: Path) -> None:
    config = ArcticConfig(model="x", placement={"device": "cuda", "address": "head:6379"})
    assert with_device(config) == config


@pytest.mark.parametrize("target", ["mock", "http://127.0.0.1:1"])
def test_elsewhere_a_model_is_a_name(target: str) -> None:
    with pytest.raises(InvalidRequestError, match="model must be a string"):
        connect(target, model={"path": "/no/such"})


def test_a_node_of_ray_s_may_take_its_time_to_start(tmp_path: Path) -> None:
    def told(**placement: Any) -> str | None:
        config = ArcticConfig(model=str(tmp_path), placement=placement)
        return environment(config).get("RAY_raylet_start_wait_time_s")

    assert told() == "150"
    assert told(start_timeout=45.5) == "22"
    assert told(start_timeout=1) == "10", "what Ray gives it anyway"
    assert told(address="auto") is None  # of a cluster that is there, its own matter
