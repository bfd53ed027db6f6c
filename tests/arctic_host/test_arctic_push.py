"""Pushes in parts on their way to the engines: written to where these read them, and nothing of a
push that does not end is left. The engines are stood for by what reads a segment as they do."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.arctic.weight_path import WeightPath
from backends.arctic.weights import staging as staging_module
from backends.arctic.weights.manifest import Form, Manifest, lay_out
from backends.arctic.weights.segment import Segment, SegmentWriter, owner_of, sweep_dead
from remote_rl.client.pushes import Plan, cut
from remote_rl.errors import BackendError, ConflictError, InvalidRequestError
from remote_rl.requests import Push, PushPart, Sync
from remote_rl.types import SyncReceipt, Tensor, TensorForm

TENSORS: dict[str, Tensor] = {
    "weight": Tensor.of(np.arange(30, dtype=np.float32).reshape(5, 6)),
    "half": Tensor(data=np.arange(7, dtype=np.uint16), dtype="bfloat16"),
    "empty": Tensor.of(np.zeros((0, 4), np.float32)),
    "scale": Tensor.of(np.float32(0.5)),
}
FORMS = {name: TensorForm.of(tensor) for name, tensor in TENSORS.items()}


def segments() -> list[str]:
    """Of this process, that have a name."""
    ours = owner_of(os.getpid()).prefix
    return sorted(name for name in os.listdir("/dev/shm") if name.startswith(ours))


@attrs.define
class Pool:
    """Engines of one model. got: what they read last, by name. failing: the next update fails."""

    forms: Mapping[str, Form] = attrs.field(
        factory=lambda: {name: (form.shape, form.dtype) for name, form in FORMS.items()}
    )
    got: dict[str, bytes] = attrs.field(factory=dict)
    seen: list[str] = attrs.field(factory=list)
    failing: bool = False
    serves: bool = True

    async def available(self, context: Any) -> None: ...

    async def update(
        self, manifest: Manifest, segment: str, in_flight: str, version: int, *given: Any
    ) -> list[str]:
        self.seen.append(segment)
        if self.failing:
            raise BackendError("an engine died")
        held = Segment.attach(segment)
        held.holds(manifest)
        self.got = {entry.name: held.array(entry).tobytes() for entry in manifest}
        return [manifest.fingerprint]


@attrs.define
class Trainers:
    """Ranks whose weights are all zeros."""

    forms: Mapping[str, Form]

    async def everywhere(self, method: str, segment: str, forms: Any, context: Any) -> Any:
        writer = SegmentWriter(segment, lay_out(forms))
        for name, tensor in TENSORS.items():
            writer.write(name, np.zeros_like(tensor.data))
        return [writer.finish()]


class Context:
    """Of one operation."""

    version, next_version, request_id = 3, 4, "c:training:1"

    async def thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.to_thread(function, *arguments)


class Reports:
    def __init__(self) -> None:
        self.served: list[Any] = []

    def serving(self, version: int | None, label: Any) -> None:
        self.served.append((version, label))


class Way:
    """A weight path, spoken to from outside a loop."""

    def __init__(self) -> None:
        self.pool, self.reports = Pool(), Reports()
        trainers: Any = Trainers(self.pool.forms)
        pool: Any = self.pool
        reports: Any = self.reports
        self.weights = WeightPath(trainers, pool, reports)

    def part(self, request: PushPart) -> None:
        context: Any = Context()
        asyncio.run(self.weights.push_part(request, context))

    def push(self, request: Push) -> SyncReceipt:
        context: Any = Context()
        return asyncio.run(self.weights.push(request, context))

    def sync(self) -> SyncReceipt:
        context: Any = Context()
        return asyncio.run(self.weights.sync(Sync(), context))

    def parts(self, part_bytes: int, transfer: str = "t") -> list[PushPart]:
        plan = Plan(TENSORS, FORMS, cut(FORMS, part_bytes))
        return [PushPart(transfer=transfer, forms=FORMS), *plan.requests(transfer, "policy")]


@pytest.fixture
def path() -> Iterator[Way]:
    assert segments() == []
    made = Way()
    yield made
    made.weights.staging.drop()
    assert segments() == []


WHOLE = {name: tensor.data.tobytes() for name, tensor in TENSORS.items()}


@given(part_bytes=st.integers(1, 160))
def test_the_engines_read_the_bits_of_one_message(part_bytes: int) -> None:
    path = Way()
    whole = path.push(Push(tensors=TENSORS, label="l"))
    assert path.pool.got == WHOLE
    path.pool.got = {}
    for request in path.parts(part_bytes):
        path.part(request)
    assert path.pool.got == {}
    assert len(segments()) == 1  # the engines have not heard of it
    receipt = path.push(Push(transfer="t", label="l"))
    assert path.pool.got == WHOLE
    assert attrs.evolve(receipt, seconds=0.0) == attrs.evolve(whole, seconds=0.0)
    assert (receipt.version, receipt.bytes) == (4, sum(map(len, WHOLE.values())))
    assert path.reports.served == [(4, "l")] * 2
    assert segments() == []


def test_the_parts_go_straight_into_the_segment_that_the_engines_read(path: Way) -> None:
    first, *parts = path.parts(60)
    path.part(first)
    (segment,) = segments()
    for request in parts:
        path.part(request)
        assert segments() == [segment]
    path.push(Push(transfer="t"))
    assert path.pool.seen == [segment]


@pytest.mark.parametrize("ending", ["another transfer", "sync", "whole push", "close"])
def test_a_segment_that_is_never_pushed_is_removed(ending: str, path: Way) -> None:
    first, second, *_ = path.parts(60)
    path.part(first)
    path.part(second)
    (old,) = segments()
    if ending == "another transfer":
        path.part(path.parts(60, "u")[0])
        (new,) = segments()
        assert new != old
    elif ending == "sync":
        path.sync()  # which a reset delivers by as well
        assert path.pool.got == {name: bytes(len(data)) for name, data in WHOLE.items()}
        assert segments() == []
    elif ending == "whole push":
        path.push(Push(tensors=TENSORS))
        assert segments() == []
    else:
        path.weights.staging.drop()
        assert segments() == []
    with pytest.raises(ConflictError, match="holds no tensors of transfer 't'"):
        path.part(second)


def test_a_push_that_fails_leaves_no_segment(path: Way) -> None:
    for request in path.parts(60):
        path.part(request)
    path.pool.failing = True
    with pytest.raises(BackendError, match="an engine died"):
        path.push(Push(transfer="t"))
    assert segments() == []
    with pytest.raises(ConflictError, match="started again since; send them anew"):
        path.push(Push(transfer="t"))


@pytest.mark.parametrize(
    ("forms", "words"),
    [
        ({**FORMS, "more": FORMS["scale"]}, "the model has no tensor 'more'"),
        ({name: FORMS[name] for name in ("half", "empty", "scale")}, "'weight' .* is missing"),
        ({**FORMS, "half": TensorForm(shape=(6,), dtype="bfloat16")}, r"'half' has shape \[6\]"),
        ({**FORMS, "half": TensorForm(shape=(7,), dtype="int64")}, "'half' has dtype int64"),
    ],
)
def test_forms_that_are_not_the_models_take_no_memory(
    forms: dict[str, TensorForm], words: str, path: Way
) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        path.part(PushPart(transfer="t", forms=forms))
    assert segments() == []


def test_another_float_than_the_engines_is_staged_as_it_is(path: Way) -> None:
    """They cast as they load."""
    forms = {**FORMS, "half": TensorForm(shape=(7,), dtype="float32")}
    path.part(PushPart(transfer="t", forms=forms))
    assert len(segments()) == 1


def test_no_room_for_a_segment_is_said_and_leaves_nothing(
    path: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(name: str, manifest: Manifest) -> Any:
        raise BackendError(f"no room for {manifest.extent} bytes")

    monkeypatch.setattr(staging_module, "SegmentWriter", full)
    with pytest.raises(BackendError, match="no room for"):
        path.part(path.parts(60)[0])
    monkeypatch.undo()
    for request in path.parts(60):
        path.part(request)
    assert path.push(Push(transfer="t")).version == 4


ABANDONED = """
import asyncio, os, sys
sys.path.insert(0, sys.argv[1])
from test_arctic_push import Way, segments

path = Way()
for request in path.parts(60)[:2]:
    path.part(request)
print(*segments(), flush=True)
os._exit(1)
"""


def test_a_dead_engines_segment_is_swept_by_the_next(path: Way) -> None:
    here = str(Path(__file__).parent)
    ended = subprocess.run(
        [sys.executable, "-c", ABANDONED, here], capture_output=True, text=True, timeout=60
    )
    (left,) = ended.stdout.split()
    assert Path("/dev/shm", left).exists()
    assert left in sweep_dead()  # what an engine does as it starts
    assert not Path("/dev/shm", left).exists()
