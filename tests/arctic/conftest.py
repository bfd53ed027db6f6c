"""Training ranks and sampling engines that tests share: started once for each kind, and as at their
start before each test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest
from arctic_models import write_model
from arctic_ranks import Ranks

if TYPE_CHECKING:
    from sampler_engine import Running

#: a Ray cluster for runs in actors
sys.path.append(str(Path(__file__).parents[1] / "ray"))


@attrs.frozen
class Kind:
    """How ranks are made. architecture: the tiny model's; untied ones are Llama's."""

    world: int
    stage: int
    architecture: str

    def __str__(self) -> str:
        return f"{self.world}x-zero{self.stage}-{self.architecture}"


EVERY_KIND = (
    Kind(1, 0, "qwen3"),
    Kind(1, 1, "llama"),
    Kind(1, 2, "qwen2"),
    Kind(1, 3, "llama"),
    Kind(2, 0, "llama"),
    Kind(2, 1, "qwen3"),
    Kind(2, 2, "llama"),
    Kind(2, 3, "qwen3"),
    Kind(3, 3, "qwen2"),  # no parameter divides by three
)
#: at night all of them
KINDS = (
    EVERY_KIND
    if os.environ.get("REMOTE_RL_NIGHTLY")
    else (Kind(1, 0, "qwen3"), Kind(2, 1, "qwen3"), Kind(2, 2, "llama"), Kind(3, 3, "qwen2"))
)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories by architecture."""
    root = tmp_path_factory.mktemp("models")
    return {
        name: write_model(root / name, name, tied=name != "llama")
        for name in ("qwen3", "llama", "qwen2")
    }


@pytest.fixture(scope="session", params=KINDS, ids=str)
def started_ranks(
    request: pytest.FixtureRequest, tiny_models: dict[str, Path]
) -> Iterator[tuple[Kind, Ranks]]:
    """A kind, and its ranks; pytest runs all tests of one kind before the next kind's."""
    from backends.arctic.training.answers import RankSettings

    kind: Kind = request.param
    settings = RankSettings(
        path=str(tiny_models[kind.architecture]),
        zero_stage=kind.stage,
        head_chunk=5,
        # so small that gradients take several collectives, and large parameters one of their own
        bucket_elements=5000,
    )
    ranks = Ranks(kind.world, settings)
    yield kind, ranks
    ranks.close()


@pytest.fixture
def kind(started_ranks: tuple[Kind, Ranks]) -> Kind:
    return started_ranks[0]


@pytest.fixture
def ranks(started_ranks: tuple[Kind, Ranks]) -> Ranks:
    started_ranks[1].call("reset")
    return started_ranks[1]


@pytest.fixture(scope="module", params=["tied", "untied"])
def engines(request: pytest.FixtureRequest) -> Running:
    """A vLLM engine whose model's head is the embedding, and one with a head of its own."""
    import sampler_engine  # vLLM

    return sampler_engine.tied_qwen3() if request.param == "tied" else sampler_engine.untied_llama()


@pytest.fixture
def running(engines: Running) -> Iterator[Running]:
    """An engine that serves its own model's weights, and does again afterwards."""
    from backends.arctic.weights.segment import owner_of

    engines.deliver(engines.model)
    yield engines
    engines.run(engines.engine.resume())
    engines.deliver(engines.model)
    ours = owner_of(os.getpid()).prefix
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(ours)]
