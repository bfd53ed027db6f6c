"""What vLLM's worker engines are told, and which of them an update goes to: against vLLM's own
classes, which make all their checks on a CPU too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sampler_environment  # noqa: F401 - before vllm
import torch
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)

from backends.arctic.sampling import transfer
from backends.arctic.weights.device_paths import rendezvous
from backends.arctic.weights.manifest import lay_out
from backends.arctic.weights.sources import IpcHandles, NcclBroadcast, Source

MANIFEST = lay_out({"a": ((2, 3), "bfloat16"), "b": ((3,), "float32")})
HANDLES = IpcHandles(({"gpu": ("a",)}, {"gpu": ("b",)}))
TOLD = {"names": ["a", "b"], "dtype_names": ["bfloat16", "float32"], "shapes": [[2, 3], [3]]}


def test_vllm_takes_what_is_told_of_handles() -> None:
    info = IPCWeightTransferUpdateInfo(**transfer.update_info(MANIFEST, HANDLES))
    assert {name: getattr(info, name) for name in TOLD} == TOLD
    assert info.ipc_handles == [{"gpu": ("a",)}, {"gpu": ("b",)}]


def test_vllm_takes_what_is_told_of_a_broadcast_and_its_group() -> None:
    info = NCCLWeightTransferUpdateInfo(**transfer.update_info(MANIFEST, NcclBroadcast()))
    assert {name: getattr(info, name) for name in TOLD} == TOLD
    joining = [
        NCCLWeightTransferInitInfo(**rendezvous("host", 1, engine, 2, 2)) for engine in range(2)
    ]
    # the trainer is 0; each engine's two workers count from its offset
    assert [(each.rank_offset, each.world_size) for each in joining] == [(1, 5), (3, 5)]


class Told:
    """Stands for a worker engine of vLLM's."""

    def __init__(self, *given: Any) -> None:
        self.given, self.updates = given, list[Any]()

    def update_weights(self, update_info: Any) -> None:
        self.updates.append(update_info)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("IPCWeightTransferEngine", "NCCLWeightTransferEngine"):
        monkeypatch.setattr(transfer, name, type(name, (Told,), {}))
    config: Any = SimpleNamespace(parallel_config=None, model_config=None)
    device, model = torch.device("cpu"), torch.nn.Module()
    return transfer.WeightEngine(SimpleNamespace(), config, device, model)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "kind"),
    [(HANDLES, "IPCWeightTransferEngine"), (NcclBroadcast(), "NCCLWeightTransferEngine")],
)
def test_an_update_goes_to_the_engine_of_its_way(engine: Any, source: Source, kind: str) -> None:
    engine.taken = []
    told = transfer.update_info(MANIFEST, source)
    engine.update_weights(told)
    engine.update_weights(told)
    other = engine._of_vllm(getattr(transfer, kind))
    assert other.updates == [told, told]
    assert other.given == (engine.config, engine.vllm_config, engine.device, engine.model)
    assert engine.taken is None  # these don't say what the model took
