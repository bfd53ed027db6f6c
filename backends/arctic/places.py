"""Arctic backend: what a run's workers ask of a Ray cluster, and what a cluster lacks of that
(imports config and engine_factory; no Ray)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import attrs

from .config import ArcticConfig
from .engine_factory import on_cpu, way_of

#: amounts by Ray's names: "CPU", "GPU"
Resources: TypeAlias = Mapping[str, float]

_LESS = "lower training.ranks or sampling.engines, or add machines to it"


@attrs.frozen
class Place:
    """What one worker takes, or the rank and the engine of one number that share a GPU. here: it
    must be on the machine of the server."""

    resources: Resources
    here: bool


def shares_gpus(config: ArcticConfig) -> bool:
    """Whether the rank and the engine of one number have one GPU between them."""
    return config.placement.colocated and not on_cpu(config)


def places(config: ArcticConfig) -> list[Place]:
    """Of all workers: ranks in their order, then engines; one for both where they share a GPU.

    Who writes and who reads weights in shared memory, the first rank and every engine, is on one
    machine, that of the server, which writes a push there too."""
    ranks, sampling = config.training.ranks, config.sampling
    here = way_of(config) == "shared_memory"
    if shares_gpus(config):
        count = max(ranks, sampling.engines)
        shared = {"GPU": 1, "CPU": 2}
        return [Place(shared, here and number < sampling.engines) for number in range(count)]
    rank = engine = {"CPU": 1.0}
    if not on_cpu(config):
        rank, engine = rank | {"GPU": 1}, engine | {"GPU": sampling.tensor_parallel}
    return [
        *(Place(rank, here and number == 0) for number in range(ranks)),
        *(Place(engine, here) for _ in range(sampling.engines)),
    ]


def place_of_engine(config: ArcticConfig, number: int) -> int:
    """Which of `places` is that of the engine of this number; a rank's is its own number."""
    return number if shares_gpus(config) else config.training.ranks + number


def shortage(
    config: ArcticConfig, nodes: Mapping[str, Resources], own: str, grows_to: Resources | None
) -> str | None:
    """What the cluster can't give, however long one waits, as a sentence; None where it may.

    nodes: what each has in all. own: the server's. grows_to: what an autoscaler may bring the
    cluster to in all, None without one."""
    wanted = places(config)
    pinned = total(place.resources for place in wanted if place.here)
    if _lacks(pinned, nodes.get(own, {})):
        return (
            "weights.path 'shared_memory' keeps the first rank and all engines on the machine of "
            f"the server, which takes {amounts(pinned)}, and of the Ray cluster this machine has "
            f"{amounts(nodes.get(own, {}), pinned)}; {_other_way(config)}"
        )
    asked, have = total(place.resources for place in wanted), total(nodes.values())
    most = have if grows_to is None else {**have, **grows_to}
    if _lacks(asked, most):
        return f"{asking(config)}, and the Ray cluster has {amounts(have, asked)}; {_LESS}"
    largest = max((node.get("GPU", 0) for node in nodes.values()), default=0)
    each = config.sampling.tensor_parallel
    if grows_to is None and not on_cpu(config) and each > largest:
        return (
            f"sampling.tensor_parallel wants {each} GPUs on one machine, and none of the Ray "
            f"cluster has more than {largest:g}; lower it, or add a machine"
        )
    return None


def asking(config: ArcticConfig) -> str:
    """What a run asks for, as the beginning of a sentence."""
    if shares_gpus(config):
        count = len(places(config))
        return f"placement.colocated wants {count} GPUs with 2 CPUs each"
    wanted = total(place.resources for place in places(config))
    keys = ["training.ranks", "sampling.engines"]
    if not on_cpu(config):
        keys.append("sampling.tensor_parallel")
    return f"{', '.join(keys[:-1])} and {keys[-1]} come to {amounts(wanted)}"


def busy(config: ArcticConfig, have: Resources, free: Resources, patience: float) -> str:
    """What is said where the places were not free within so many seconds."""
    asked = total(place.resources for place in places(config))
    return (
        f"{asking(config)}, and of the Ray cluster's {amounts(have, asked)} only "
        f"{amounts(free, asked)} were free, or not together on the machines that they must be on, "
        f"within {patience:g} s; {_LESS}, or free some"
    )


def total(given: Iterable[Resources]) -> dict[str, float]:
    """The sum of each resource."""
    found: dict[str, float] = {}
    for each in given:
        for name, amount in each.items():
            found[name] = found.get(name, 0) + amount
    return found


def amounts(given: Resources, named: Resources | None = None) -> str:
    """ "2 GPUs and 4 CPUs", of the kinds that `named` has."""
    kinds = [kind for kind in ("GPU", "CPU") if kind in (given if named is None else named)]
    return " and ".join(
        f"{given.get(kind, 0):g} {kind}{'' if given.get(kind, 0) == 1 else 's'}" for kind in kinds
    )


def _lacks(wanted: Resources, have: Resources) -> bool:
    return any(amount > have.get(name, 0) for name, amount in wanted.items())


def _other_way(config: ArcticConfig) -> str:
    other = "gloo" if on_cpu(config) or config.placement.colocated else "nccl"
    return f"lower sampling.engines, or set weights.path '{other}', which needs no shared memory"
