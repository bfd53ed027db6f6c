"""Which GPU a rank and an engine get, shown with GPUs that Ray only counts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from backends.arctic.config import ArcticConfig
from remote_rl.errors import InvalidRequestError

#: prints the GPUs of ranks and engines, or why they got none
_PLACED = """
import json, sys
from pathlib import Path
import ray
from backends.arctic.cluster import Cluster
from backends.arctic.config import ArcticConfig
from remote_rl.errors import BackendError

class Worker:
    def gpus(self):
        return ray.get_gpu_ids()

gpus, options = json.loads(sys.argv[2])
config = ArcticConfig(model="any", **options)
ranks, engines = config.training.ranks, config.sampling.engines
ray.init(
    address="local", num_cpus=8, num_gpus=gpus, include_dashboard=False, _temp_dir=sys.argv[1]
)
cluster = Cluster(config, Path(sys.argv[1]))
try:
    if config.placement.colocated:
        cluster.share()
except BackendError as error:
    print(json.dumps(str(error)))
    sys.exit()
remote = ray.remote(Worker)
# as they start: all ranks, then all engines
workers = [remote.options(**cluster.actor_options(number)).remote() for number in range(ranks)]
devices = config.sampling.tensor_parallel
workers += [
    remote.options(**cluster.actor_options(number, devices)).remote() for number in range(engines)
]
print(json.dumps(ray.get([worker.gpus.remote() for worker in workers])))
"""


def placed(gpus: int, **options: Any) -> Any:
    folder = Path(tempfile.mkdtemp(prefix="rr", dir="/tmp"))  # short, for Ray's sockets
    arguments = json.dumps([gpus, options])
    try:
        told = subprocess.run(
            [sys.executable, "-c", _PLACED, str(folder), arguments],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            timeout=300,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return json.loads(told.stdout.splitlines()[-1])


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
    assert "cluster has 1 and 8" in error


def test_an_engine_of_several_gpus_is_not_colocated() -> None:
    options = halves(1, 1, colocated=True)
    options["sampling"]["tensor_parallel"] = 2
    with pytest.raises(InvalidRequestError, match=r"sampling.tensor_parallel above 1 can't be"):
        ArcticConfig(model="any", **options)
