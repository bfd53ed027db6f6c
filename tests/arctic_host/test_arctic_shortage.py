"""What a Ray cluster can't give a run, by what its machines have."""

from __future__ import annotations

from typing import Any

import pytest

from backends.arctic.config import ArcticConfig
from backends.arctic.places import shortage


def halves(ranks: int, engines: int, tensor_parallel: int = 1, **placement: Any) -> dict[str, Any]:
    return {
        "training": {"ranks": ranks},
        "sampling": {"engines": engines, "tensor_parallel": tensor_parallel},
        "placement": {"device": "cuda", **placement},
    }


def lacking(
    nodes: list[tuple[int, int]],
    options: dict[str, Any],
    path: str = "auto",
    grows_to: dict[str, float] | None = None,
) -> str | None:
    """nodes: CPUs and GPUs of each, the first is the server's."""
    given = {f"node {each}": {"CPU": cpus, "GPU": gpus} for each, (cpus, gpus) in enumerate(nodes)}
    config = ArcticConfig(model="any", weights={"path": path}, **options)
    return shortage(config, given, "node 0", grows_to)


@pytest.mark.parametrize(
    ("nodes", "options", "path", "sentence"),
    [
        (
            [(8, 1), (8, 8)],
            halves(1, 1),
            "auto",
            "weights.path 'shared_memory' keeps the first rank and all engines on the machine of "
            "the server, which takes 2 GPUs and 2 CPUs, and of the Ray cluster this machine has "
            "1 GPU and 8 CPUs; lower sampling.engines, or set weights.path 'nccl', which needs no "
            "shared memory",
        ),
        (
            [(1, 0), (8, 0)],
            halves(1, 1, device="cpu"),
            "auto",
            "weights.path 'shared_memory' keeps the first rank and all engines on the machine of "
            "the server, which takes 2 CPUs, and of the Ray cluster this machine has 1 CPU; lower "
            "sampling.engines, or set weights.path 'gloo', which needs no shared memory",
        ),
        (
            [(8, 1), (8, 8)],
            halves(2, 2, colocated=True),
            "shared_memory",
            "weights.path 'shared_memory' keeps the first rank and all engines on the machine of "
            "the server, which takes 2 GPUs and 4 CPUs, and of the Ray cluster this machine has "
            "1 GPU and 8 CPUs; lower sampling.engines, or set weights.path 'gloo', which needs no "
            "shared memory",
        ),
        (
            [(8, 3), (8, 1)],
            halves(4, 2),
            "auto",
            "training.ranks, sampling.engines and sampling.tensor_parallel come to 6 GPUs and 6 "
            "CPUs, and the Ray cluster has 4 GPUs and 16 CPUs; lower training.ranks or "
            "sampling.engines, or add machines to it",
        ),
        (
            [(2, 0), (1, 0)],
            halves(3, 1, device="cpu"),
            "auto",
            "training.ranks and sampling.engines come to 4 CPUs, and the Ray cluster has 3 CPUs; "
            "lower training.ranks or sampling.engines, or add machines to it",
        ),
        (
            [(8, 1), (8, 1)],
            halves(3, 2, colocated=True),
            "auto",
            "placement.colocated wants 3 GPUs with 2 CPUs each, and the Ray cluster has 2 GPUs and "
            "16 CPUs; lower training.ranks or sampling.engines, or add machines to it",
        ),
        (
            [(8, 2), (8, 2), (8, 2)],
            halves(1, 1, 4),
            "nccl",
            "sampling.tensor_parallel wants 4 GPUs on one machine, and none of the Ray cluster has "
            "more than 2; lower it, or add a machine",
        ),
    ],
    ids=["apart", "CPUs apart", "shared", "GPUs", "CPUs", "shared GPUs", "tensor parallel"],
)
def test_what_is_not_there_is_named_with_what_to_do(
    nodes: list[tuple[int, int]], options: dict[str, Any], path: str, sentence: str
) -> None:
    assert lacking(nodes, options, path) == sentence


@pytest.mark.parametrize(
    ("nodes", "options", "path"),
    [
        ([(2, 2), (8, 8)], halves(3, 1), "auto"),
        ([(3, 0), (8, 0)], halves(2, 2, device="cpu"), "auto"),
        ([(1, 0), (8, 0)], halves(2, 2, device="cpu"), "gloo"),
        ([(8, 1), (8, 8)], halves(1, 1), "nccl"),
        ([(4, 1), (4, 1)], halves(2, 2, colocated=True), "auto"),
    ],
)
def test_a_cluster_that_has_it_is_not_refused(
    nodes: list[tuple[int, int]], options: dict[str, Any], path: str
) -> None:
    assert lacking(nodes, options, path) is None


def test_a_cluster_that_may_grow_is_waited_for_unless_the_server_s_machine_is_too_small() -> None:
    more = {"GPU": 16.0, "CPU": 64.0}
    assert lacking([(8, 3), (8, 1)], halves(4, 2), grows_to=more) is None
    assert lacking([(8, 2)], halves(1, 1, 4), "nccl", more) is None
    assert lacking([(8, 1)], halves(1, 1), grows_to=more) is not None
    assert lacking([(8, 2)], halves(20, 1), "nccl", more) is not None
