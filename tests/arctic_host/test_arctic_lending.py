"""Syncs whose ranks lend the engines what they hold, each on its own GPU. Ranks and engines are
stood for; what they tell each other is as it is with GPUs."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from typing import Any

import attrs
import pytest

from backends.arctic.weight_path import WeightPath
from backends.arctic.weights.manifest import Form, Manifest
from backends.arctic.weights.sources import IpcHandles, Source
from remote_rl.errors import BackendError
from remote_rl.requests import Sync
from remote_rl.types import SyncReceipt

#: in the order of the sampler's files, which is not that of the trainer's parameters
SERVED: Mapping[str, Form] = {"b": ((3,), "bfloat16"), "a": ((2, 2), "bfloat16")}
HELD: Mapping[str, Form] = {"a": ((2, 2), "float32"), "b": ((3,), "float32")}


@attrs.define
class Ranks:
    """Two, on GPUs of their own. fails: the method in which they die."""

    forms: Mapping[str, Form] = HELD
    fails: str = ""
    failure: BackendError | None = None
    asked: list[str] = attrs.field(factory=list)

    async def everywhere(self, method: str, *given: Any, context: Any) -> list[Any]:
        self.asked.append(method)
        if method == self.fails:
            self.failure = BackendError("rank 0 died", worker="rank 0")
            raise self.failure.copy()
        if method == "lend":
            assert given == (SERVED,)
            return [
                IpcHandles(tuple({f"gpu {rank}": f"{name} of {rank}"} for name in HELD))
                for rank in range(2)
            ]
        return [None, None]


@attrs.define
class Engines:
    """What they were told. fails: as it is for an update that fails half-way."""

    forms: Mapping[str, Form] = SERVED
    serves: bool = True
    fails: bool = False
    told: list[tuple[Manifest, Source]] = attrs.field(factory=list)

    async def available(self, context: Any) -> None: ...

    async def update(self, manifest: Manifest, source: Source, *given: Any) -> list[str]:
        self.told.append((manifest, source))
        if self.fails:
            self.serves = False
            raise BackendError("half-way")
        return [manifest.fingerprint] * 2


class Reports:
    def __init__(self) -> None:
        self.served: list[Any] = []

    def serving(self, version: int | None, label: Any) -> None:
        self.served.append((version, label))


class Context:
    version, next_version, request_id = 3, 4, "c:training:1"


def synced(ranks: Any, engines: Any, reports: Any) -> SyncReceipt:
    context: Any = Context()
    path = WeightPath(ranks, engines, reports, "cuda_ipc")
    return asyncio.run(path.sync(Sync(label="l"), context))


def test_each_engine_is_told_of_every_tensor_on_every_gpu() -> None:
    ranks, engines, reports = Ranks(), Engines(), Reports()
    receipt = synced(ranks, engines, reports)
    ((manifest, source),) = engines.told
    assert isinstance(source, IpcHandles)
    told = dict(zip((entry.name for entry in manifest), source.handles, strict=True))
    assert told == {name: {"gpu 0": f"{name} of 0", "gpu 1": f"{name} of 1"} for name in ("a", "b")}
    assert manifest.forms == SERVED  # in the dtype that is served
    assert (receipt.version, receipt.tensors, receipt.bytes) == (3, 2, 14)
    assert receipt.source_fingerprint == receipt.sampler_fingerprint
    assert reports.served == [(3, "l")]
    assert not [name for name in os.listdir("/dev/shm") if str(os.getpid()) in name]


def test_the_log_says_what_was_sent_and_expected(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "remote_rl.arctic"):
        synced(Ranks(), Engines(), Reports())
    assert "c:training:1: version 3, 2 tensors sent, 2 expected" in caplog.messages


def test_what_was_lent_is_taken_back_when_the_engines_have_read_it() -> None:
    ranks = Ranks()
    synced(ranks, Engines(), Reports())
    assert ranks.asked == ["lend", "take_back"]


def test_an_update_that_fails_half_way_is_told_and_gives_back_too() -> None:
    ranks, reports = Ranks(), Reports()
    with pytest.raises(BackendError, match="half-way"):
        synced(ranks, Engines(fails=True), reports)
    assert ranks.asked == ["lend", "take_back"]
    assert reports.served == [(None, None)]


def test_ranks_that_die_in_it_are_what_is_told() -> None:
    ranks, engines = Ranks(fails="lend"), Engines()
    with pytest.raises(BackendError, match="rank 0 died"):
        synced(ranks, engines, Reports())
    assert ranks.asked == ["lend"]
    assert engines.told == []
