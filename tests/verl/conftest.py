"""Tests of the verl shim need verl's environment; without verl installed none is collected."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from verl_runs import Trainings

try:
    # not find_spec: this folder's own name could pass for a namespace package
    importlib.metadata.version("verl")
except importlib.metadata.PackageNotFoundError:
    collect_ignore_glob = ["test_verl_*.py"]
else:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl and what it imports warn freely as they load
        importlib.import_module("shims.verl.trainer")


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tokenizer, data and the rest that the command line names."""
    from verl_workload import build_inputs

    return build_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def train(inputs: dict[str, Path], tmp_path: Path) -> Iterator[Trainings]:
    """Runs `main_ppo`; see `verl_runs.Trainings`."""
    from verl_runs import Trainings

    trainings = Trainings(inputs, tmp_path)
    yield trainings
    trainings.close()


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """For a cluster: short enough for Ray's sockets, and outside the environment, where Ray wants
    none."""
    folder = Path(tempfile.mkdtemp(prefix="rl", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def stock_config() -> DictConfig:
    """verl's stock configuration, as `main_ppo` composes it."""
    import hydra

    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose("ppo_trainer")


@pytest.fixture(scope="session")
def config(stock_config: DictConfig, inputs: dict[str, Path]) -> Callable[..., DictConfig]:
    """The tests' training with further `key=value` overrides on top."""
    from omegaconf import OmegaConf
    from verl_workload import overrides

    base = copy.deepcopy(stock_config)
    OmegaConf.set_struct(base, False)
    training = [each.lstrip("+") for each in overrides(inputs, "http://127.0.0.1:7700", steps=5)]
    base = OmegaConf.merge(base, OmegaConf.from_dotlist(training))
    return lambda *more: OmegaConf.merge(base, OmegaConf.from_dotlist(list(more)))
