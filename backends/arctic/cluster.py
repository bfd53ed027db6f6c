"""Arctic backend: the Ray cluster that the workers run on, an own one or one that is there
(imports ray, config, engine_factory, places, leftovers and the way into a cluster of remote_rl)."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from remote_rl.errors import BackendError, describe
from remote_rl.transports.ray_cluster import joined

from .config import ArcticConfig
from .engine_factory import environment, on_cpu
from .leftovers import Owner, owner_of
from .places import busy, place_of_engine, places, shares_gpus, shortage, total

PROBE_SECONDS = 1.0
_PROBE_TRIES = 3
_OWN_PATIENCE_SECONDS = 10.0
_LAST_LINES = 20
#: a label that Ray gives every node
_NODE_LABEL = "ray.io/node-id"
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


class Cluster:
    """Joins or starts a cluster; hands out what actors need; tells when its head is gone."""

    def __init__(self, config: ArcticConfig, directory: Path) -> None:
        self._config = config
        self._directory = directory
        self._probe: asyncio.Task[None] | None = None
        #: for Ray, by the numbers of `places`
        self._reserved: dict[int, PlacementGroupSchedulingStrategy] = {}

    def join(self) -> None:
        """Joins the cluster, or starts one, which ends with this process: two or three seconds."""
        placement = self._config.placement
        ranks, engines = self._config.training.ranks, self._config.sampling.engines
        if placement.address is not None:
            joined(placement.address)
            return
        try:
            ray.init(
                address="local",
                num_cpus=2 * max(ranks, engines) if placement.colocated else ranks + engines,
                include_dashboard=False,
                object_store_memory=placement.object_store_mib << 20,
                log_to_driver=False,
                _temp_dir=str(self._directory / "ray"),
            )
        except Exception as error:  # Ray raises plain ones too, where a process of its own is slow
            raise BackendError(
                f"a Ray cluster of its own could not be started ({describe(error)})",
                worker="Ray",
                traceback=traceback.format_exc(),
            ) from error

    def reserve(self) -> None:
        """Takes the places of all workers, before any of them loads anything: in a cluster that is
        there, and where the halves share GPUs (half a GPU each would not do: Ray could put two
        ranks on one). Ends with this process's job.

        Raises `BackendError`: at once where the cluster has not so much, and where others have it,
        after start_timeout, or, in a cluster of our own, after seconds."""
        placement = self._config.placement
        if placement.address is None and not shares_gpus(self._config):
            return
        nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
        own = ray.get_runtime_context().get_node_id()
        grows_to = ray._private.state.state.get_max_resources_from_cluster_config()
        lacking = shortage(self._config, nodes, own, grows_to)
        if lacking is None:
            patience = placement.start_timeout
            if placement.address is None:
                patience = min(patience, _OWN_PATIENCE_SECONDS)
            if self._took(own, patience):
                return
            wanted = places(self._config)
            own_part = [wanted[number].resources for number in self._reserved]
            free = total([ray.available_resources(), *own_part])
            lacking = busy(self._config, total(nodes.values()), free, patience)
        raise BackendError(lacking, worker="Ray")

    def _took(self, own: str, patience: float) -> bool:
        """Whether all places were free within so many seconds. Those that are bound to this machine
        come first: Ray deals out one group greedily, and would give their room to others."""
        end = time.monotonic() + patience
        wanted = list(enumerate(places(self._config)))
        for here in (True, False):
            group = [(number, place) for number, place in wanted if place.here is here]
            if not group:
                continue
            reserved = ray.util.placement_group(
                [dict(place.resources) for _, place in group],
                bundle_label_selector=[{_NODE_LABEL: own} if here else {}] * len(group),
            )
            if not reserved.wait(max(end - time.monotonic(), 0)):
                return False
            for index, (number, _) in enumerate(group):
                self._reserved[number] = PlacementGroupSchedulingStrategy(reserved, index)
        return True

    def watch(self, lost: Callable[[str], None]) -> None:
        """From now on `lost` is called, with the reason, when the cluster's head or this machine's
        raylet is gone. Ray itself tells of the one after a minute, when it ends this process, and
        of the other after 15 seconds."""
        self._probe = asyncio.create_task(self._watch(lost), name="arctic cluster probe")

    async def _watch(self, lost: Callable[[str], None]) -> None:
        listening = await asyncio.get_running_loop().run_in_executor(None, _listening)
        failures = dict.fromkeys(listening, 0)
        while True:
            # what doesn't answer is asked again at once
            await asyncio.sleep(PROBE_SECONDS if not any(failures.values()) else PROBE_SECONDS / 5)
            for name, (host, port) in listening.items():
                try:
                    async with asyncio.timeout(2 * PROBE_SECONDS):
                        _, writer = await asyncio.open_connection(host, port)
                    writer.close()
                    failures[name] = 0
                except (OSError, TimeoutError) as error:
                    failures[name] += 1
                    if failures[name] >= _PROBE_TRIES:
                        lost(f"{name} of the Ray cluster is gone ({describe(error)})")
                        return

    def last_words(self, worker: Owner | None) -> str:
        """The end of what a worker of this machine has written to its stderr, as a paragraph; empty
        where there is nothing to be found."""
        if worker is None:
            return ""
        folder = Path(ray._private.worker._global_node.get_logs_dir_path())
        lines: list[str] = []
        for path in folder.glob(f"worker-*-{worker.process}.err"):
            text = path.read_text(encoding="utf-8", errors="replace")
            lines += [line for line in text.splitlines() if line and not line.startswith(":")]
        return "\nIts last output:\n" + "\n".join(lines[-_LAST_LINES:]) if lines else ""

    async def close(self) -> None:
        """Leaves the cluster; one of our own ends."""
        if self._probe is not None:
            self._probe.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._probe
        await asyncio.get_running_loop().run_in_executor(None, ray.shutdown)

    def rank_options(self, number: int) -> dict[str, Any]:
        """Of the Ray actor of a training rank."""
        return self._options(number, 1)

    def engine_options(self, number: int) -> dict[str, Any]:
        """Of the Ray actor of a sampling engine."""
        devices = self._config.sampling.tensor_parallel
        return self._options(place_of_engine(self._config, number), devices)

    def _options(self, place: int, devices: int) -> dict[str, Any]:
        options: dict[str, Any] = {"num_cpus": 1, "max_restarts": 0}
        if not on_cpu(self._config):
            options["num_gpus"] = 0.5 if shares_gpus(self._config) else devices
        if place in self._reserved:
            options["scheduling_strategy"] = self._reserved[place]
        return options

    def environment(self, threads: int | None) -> dict[str, str]:
        """Of one worker."""
        if on_cpu(self._config):
            workers = self._config.training.ranks + self._config.sampling.engines
            share = max(1, (os.cpu_count() or 1) // workers)
            return environment(self._config) | {"OMP_NUM_THREADS": str(threads or share)}
        return environment(self._config)


def begin_worker(variables: dict[str, str]) -> Owner:
    """First thing in a worker, before torch is imported: its environment, and that it dies with
    its raylet, whatever it does then. Which process it is."""
    os.environ.update(variables)
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    return owner_of(os.getpid())


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _listening() -> dict[str, tuple[str, int]]:
    """Where the head and the own node's raylet listen."""
    own = ray.get_runtime_context()
    host, _, port = own.gcs_address.rpartition(":")
    found = {"the head": (host.strip("[]"), int(port))}
    for node in ray.nodes():
        if node["NodeID"] == own.get_node_id():
            found["this machine's raylet"] = (node["NodeManagerAddress"], node["NodeManagerPort"])
    return found
