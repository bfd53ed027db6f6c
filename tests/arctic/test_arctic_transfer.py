"""What vLLM's worker engines are told, and which of them an update goes to: against vLLM's own
classes, which make all their checks on a CPU too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sampler_environment  # noqa: F401 - before vllm
import torch
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo

from backends.arctic.sampling import transfer
from backends.arctic.weights.manifest import lay_out
from backends.arctic.weights.sources import Broadcast, IpcHandles, Meeting
from remote_rl.errors import BackendError

MANIFEST = lay_out({"a": ((2, 3), "bfloat16"), "b": ((3,), "float32")})
MEETING = Meeting("nccl", "one", "host", 1, 5, 60.0)
HANDLES = IpcHandles(({"gpu": ("a",)}, {"gpu": ("b",)}))
TOLD = {"names": ["a", "b"], "dtype_names": ["bfloat16", "float32"], "shapes": [[2, 3], [3]]}


def test_vllm_takes_what_is_told_of_handles() -> None:
    info = IPCWeightTransferUpdateInfo(**transfer.update_info(MANIFEST, HANDLES))
    assert {name: getattr(info, name) for name in TOLD} == TOLD
    assert info.ipc_handles == [{"gpu": ("a",)}, {"gpu": ("b",)}]


def test_each_worker_of_each_engine_has_a_number_of_its_own_in_a_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trainer is 0; two engines of two workers each come after it."""
    numbers = []
    monkeypatch.setattr(transfer, "join", lambda meeting, number: numbers.append(number))
    for first in (1, 3):
        for rank in range(2):
            worker = worker_engine(rank)
            told = {"meeting": MEETING, "first": first}
            worker.init_transfer_engine(worker.parse_init_info(told))
    assert numbers == [1, 2, 3, 4]


class Told:
    """Stands for a worker engine of vLLM's."""

    def __init__(self, *given: Any) -> None:
        self.given, self.updates = given, list[Any]()

    def update_weights(self, update_info: Any) -> None:
        self.updates.append(update_info)


def worker_engine(rank: int = 0) -> Any:
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(rank=rank), model_config=None)
    device, model = torch.device("cpu"), torch.nn.Module()
    return transfer.WeightEngine(SimpleNamespace(), config, device, model)  # type: ignore[arg-type]


def test_handles_go_to_vllm_s_own_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "IPCWeightTransferEngine", Told)
    engine = worker_engine()
    engine.taken = []
    told = transfer.update_info(MANIFEST, HANDLES)
    engine.update_weights(told)
    engine.update_weights(told)
    other = engine._of_vllm(Told)
    assert other.updates == [told, told]
    assert other.given == (engine.config, engine.vllm_config, engine.device, engine.model)
    assert engine.taken is None  # it doesn't say what the model took


def test_a_broadcast_in_a_group_that_is_another_s_is_refused() -> None:
    engine = worker_engine()
    engine.model.load_weights = list  # type: ignore[assignment]
    with pytest.raises(BackendError, match="in no group 'one'"):
        engine.update_weights(transfer.update_info(MANIFEST, Broadcast("one")))
