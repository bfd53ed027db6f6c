"""Which machine and which GPU a rank and an engine get, shown with nodes and GPUs that Ray only
counts: every node is a raylet of its own on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from arctic_models import write_model

from backends.arctic.config import ArcticConfig
from remote_rl import connect
from remote_rl.errors import BackendError, InvalidRequestError

#: a start that is refused at once, on a machine that does much else, against one that waits
PATIENCE = 200.0

#: prints the node (its place among those given) and the GPUs of ranks and engines, or why they got
#: none; the first node is the server's
_PLACED = """
import json, sys
from pathlib import Path
import ray
from ray.cluster_utils import Cluster as Nodes
from backends.arctic.cluster import Cluster
from backends.arctic.config import ArcticConfig
from remote_rl.errors import BackendError

class Worker:
    def place(self):
        return ray.get_runtime_context().get_node_id(), ray.get_gpu_ids()

folder, given, options, taken = sys.argv[1], *map(json.loads, sys.argv[2:])
if len(given) == 1:
    [node] = given
    ray.init(address="local", include_dashboard=False, _temp_dir=folder, **node)
    order = [ray.get_runtime_context().get_node_id()]
else:
    nodes = Nodes()
    order = [nodes.add_node(object_store_memory=80 << 20, **node).node_id for node in given]
    options["placement"]["address"] = nodes.address
config = ArcticConfig(model="any", **options)
ranks, engines = config.training.ranks, config.sampling.engines
cluster = Cluster(config, Path(folder))
if len(given) > 1:
    cluster.join()
assert ray.get_runtime_context().get_node_id() == order[0]
remote = ray.remote(Worker)
others = [remote.options(**each).remote() for each in taken]
ray.get([each.place.remote() for each in others])
try:
    cluster.reserve()
except BackendError as error:
    print(json.dumps(str(error)))
    sys.exit()
# as they start: all ranks, then all engines
workers = [remote.options(**cluster.rank_options(number)).remote() for number in range(ranks)]
workers += [remote.options(**cluster.engine_options(number)).remote() for number in range(engines)]
found = ray.get([worker.place.remote() for worker in workers])
print(json.dumps([[order.index(node), gpus] for node, gpus in found]))
"""


def run_in_cluster(
    nodes: list[dict[str, int]], options: dict[str, Any], taken: list[dict[str, int]]
) -> Any:
    folder = Path(tempfile.mkdtemp(prefix="rr", dir="/tmp"))  # short, for Ray's sockets
    (folder / "ray").mkdir()
    try:
        told = subprocess.run(
            [
                *(sys.executable, "-c", _PLACED, str(folder)),
                *map(json.dumps, (nodes, options, taken)),
            ],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            timeout=300,
            # what says where the cluster is must not be read by anybody else
            env={**os.environ, "RAY_TMPDIR": str(folder)},
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return json.loads(told.stdout.splitlines()[-1])


def placed(gpus: int, **options: Any) -> Any:
    """In a cluster of its own."""
    found = run_in_cluster([{"num_cpus": 8, "num_gpus": gpus}], options, [])
    return found if isinstance(found, str) else [gpus for _, gpus in found]


def joined(
    *nodes: tuple[int, int], taken: list[dict[str, int]] | None = None, **options: Any
) -> Any:
    """In a cluster that is there. nodes: CPUs and GPUs of each. taken: by others, as options of
    their actors."""
    given = [{"num_cpus": cpus, "num_gpus": gpus} for cpus, gpus in nodes]
    return run_in_cluster(given, options, taken or [])


def halves(ranks: int, engines: int, **placement: Any) -> dict[str, Any]:
    return {
        "training": {"ranks": ranks},
        "sampling": {"engines": engines},
        "placement": {"device": "cuda", **placement},
    }


def test_colocated_the_rank_and_the_engine_of_one_number_share_a_gpu() -> None:
    first, second, *engines = placed(2, **halves(2, 2, colocated=True))
    assert len(first) == len(second) == 1
    assert first != second, "two ranks on one GPU can't meet in NCCL"
    assert engines == [first, second]


def test_apart_everybody_has_gpus_of_its_own() -> None:
    options = halves(1, 1)
    options["sampling"]["tensor_parallel"] = 2
    rank, engine = placed(3, **options)
    assert (len(rank), len(engine)) == (1, 2)
    assert not set(rank) & set(engine)


def test_too_few_gpus_to_share_are_named() -> None:
    error = placed(1, **halves(2, 1, colocated=True))
    assert error.startswith("placement.colocated wants 2 GPUs with 2 CPUs each, and the Ray ")
    assert "cluster has 1 GPU and 8 CPUs" in error


def test_an_engine_of_several_gpus_is_not_colocated() -> None:
    options = halves(1, 1, colocated=True)
    options["sampling"]["tensor_parallel"] = 2
    with pytest.raises(InvalidRequestError, match=r"sampling.tensor_parallel above 1 can't be"):
        ArcticConfig(model="any", **options)


# -- in a cluster of several machines -------------------------------------------------------------


def test_where_weights_go_through_shared_memory_engines_and_the_first_rank_are_on_one_machine() -> (
    None
):
    options = halves(3, 2)
    options["sampling"]["tensor_parallel"] = 2
    # more room elsewhere
    found = joined((8, 5), (8, 8), **options)
    first, *others, engine, second = [node for node, _ in found]
    assert [first, engine, second] == [0, 0, 0]
    assert others == [1, 1]
    assert [len(gpus) for _, gpus in found] == [1, 1, 1, 2, 2]


def test_on_cpus_too() -> None:
    found = joined((3, 0), (8, 0), **halves(2, 2, device="cpu"))
    assert [node for node, _ in found] == [0, 1, 0, 0]


def test_halves_that_share_gpus_are_on_the_server_s_machine_where_they_share_its_memory() -> None:
    options = halves(2, 1, colocated=True)
    options["weights"] = {"path": "shared_memory"}
    assert [node for node, _ in joined((2, 1), (8, 8), **options)] == [0, 1, 0]


def test_halves_that_share_gpus_need_no_one_machine_for_cuda_ipc() -> None:
    first, second, engine, other = joined((2, 1), (2, 1), **halves(2, 2, colocated=True))
    assert {first[0], second[0]} == {0, 1}
    assert [engine, other] == [first, second]


def test_what_a_cluster_has_not_is_said_at_once() -> None:
    """All of it: tests/arctic_host/test_arctic_shortage.py."""
    begin = time.monotonic()
    error = joined((8, 1), (8, 8), **halves(1, 1))
    assert error.startswith("weights.path 'shared_memory' keeps the first rank and all engines on ")
    assert time.monotonic() - begin < PATIENCE, "it waited for start_timeout"


def test_what_others_have_taken_is_waited_for_and_named() -> None:
    options = halves(1, 1, start_timeout=3.0)
    error = joined((8, 2), (8, 2), taken=[{"num_gpus": 1, "num_cpus": 2}] * 4, **options)
    assert error == (
        "training.ranks, sampling.engines and sampling.tensor_parallel come to 2 GPUs and 2 CPUs, "
        "and of the Ray cluster's 4 GPUs and 16 CPUs only 0 GPUs and 8 CPUs were free, or not "
        "together on the machines that they must be on, within 3 s; lower training.ranks or "
        "sampling.engines, or add machines to it, or free some"
    )


def test_a_start_ends_with_it_before_a_model_is_loaded(tmp_path: Path) -> None:
    from own_cluster import own_cluster  # of tests/ray, which conftest.py puts on the path

    model = write_model(tmp_path / "model", "qwen3")
    with own_cluster() as started:  # one machine of 4 CPUs
        begin = time.monotonic()
        with pytest.raises(BackendError, match=r"weights.path 'shared_memory' .* 5 CPUs, and .* 4"):
            connect(
                "arctic",
                model=str(model),
                sampling={"engines": 4},
                placement={"device": "cpu", "address": started.address, "start_timeout": 1000},
            )
        assert time.monotonic() - begin < PATIENCE, "it waited for start_timeout"
