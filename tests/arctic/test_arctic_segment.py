"""Segments of shared memory: contents, refusals, and that nothing of a dead process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from backends.arctic.weights.manifest import Form, Manifest, lay_out
from backends.arctic.weights.segment import (
    PREFIX,
    Segment,
    SegmentWriter,
    new_name,
    owner_of,
    remove_of,
    sweep_dead,
    unlink,
)
from remote_rl.errors import BackendError, InvalidRequestError

FORMS: dict[str, Form] = {
    "weight": ((3, 5), "float32"),
    "half": ((7,), "bfloat16"),
    "empty": ((0, 4), "float32"),
    "step": ((), "int64"),
}
FOLDER = Path("/dev/shm")


@pytest.fixture
def name() -> Iterator[str]:
    chosen = new_name()
    yield chosen
    unlink(chosen)


def _values() -> dict[str, Any]:
    return {
        "weight": np.arange(15, dtype=np.float32).reshape(3, 5),
        "half": np.arange(7, dtype=np.uint16),
        "empty": np.zeros((0, 4), np.float32),
        "step": np.array(3, np.int64),
    }


def test_what_was_written_is_read_in_another_process(name: str) -> None:
    manifest = lay_out(FORMS)
    writer = SegmentWriter(name, manifest)
    for each, array in reversed(_values().items()):
        assert writer.write(each, array).name == each
    assert writer.finish() == manifest.entries
    code = f"""
import numpy as np
from backends.arctic.weights.manifest import lay_out
from backends.arctic.weights.segment import Segment
segment = Segment.attach({name!r})
manifest = lay_out({FORMS!r})
segment.holds(manifest)
print([segment.array(entry).tolist() for entry in manifest])
"""
    done = _python(code)
    assert done.stdout.strip() == str([array.tolist() for array in _values().values()])
    assert done.stderr == "", "a resource tracker, or a warning, spoke"
    assert (FOLDER / name).exists(), "the reader's end removed it"


def test_torch_tensors_are_cast_to_the_manifests_dtype(name: str) -> None:
    values = torch.randn(7)
    writer = SegmentWriter(name, lay_out({"half": FORMS["half"]}))
    [entry] = [writer.write("half", torch.nn.Parameter(values))]
    held = torch.from_numpy(Segment.attach(name).array(entry)).view(torch.bfloat16)
    assert torch.equal(held, values.bfloat16())


@pytest.mark.parametrize(
    ("tensor", "array", "message"),
    [
        ("wieght", np.zeros((3, 5), np.float32), "not in the manifest .did you mean 'weight'"),
        ("weight", np.zeros((5, 3), np.float32), r"shape \[5, 3\], in the manifest \[3, 5\]"),
        ("weight", np.zeros((3, 5), np.float64), "is an array of float64"),
        ("half", np.zeros(7, np.float32), "bfloat16 is held as uint16"),
    ],
)
def test_a_wrong_tensor_is_refused_by_name(
    name: str, tensor: str, array: Any, message: str
) -> None:
    writer = SegmentWriter(name, lay_out(FORMS))
    with pytest.raises(InvalidRequestError, match=message) as caught:
        writer.write(tensor, array)
    assert caught.value.details["field"] == tensor


def test_each_tensor_is_written_once(name: str) -> None:
    """One without bytes has nothing to be written."""
    writer = SegmentWriter(name, lay_out(FORMS))
    values = _values()
    writer.write("step", values["step"])
    with pytest.raises(InvalidRequestError, match="'step' was written twice"):
        writer.write("step", values["step"])
    with pytest.raises(BackendError, match="2 tensors were not written, 'half' among them"):
        writer.finish()


def test_a_segment_that_is_gone_or_too_small_is_named(name: str) -> None:
    with pytest.raises(BackendError, match=f"'{name}' is gone"):
        Segment.attach(name)
    Segment.create(name, 64)
    with pytest.raises(BackendError, match="has 64 bytes, and its manifest speaks of"):
        Segment.attach(name).holds(lay_out(FORMS))
    with pytest.raises(FileExistsError):
        Segment.create(name, 64)


def test_what_the_machine_has_no_room_for_is_refused(name: str) -> None:
    space = os.statvfs(FOLDER)
    with pytest.raises(BackendError, match="has no room for"):
        Segment.create(name, space.f_blocks * space.f_frsize + (1 << 20))
    assert not (FOLDER / name).exists()


def test_a_mapping_outlives_its_name(name: str) -> None:
    manifest = lay_out({"weight": FORMS["weight"]})
    writer = SegmentWriter(name, manifest)
    writer.write("weight", _values()["weight"])
    array = Segment.attach(name).array(manifest.entries[0])
    del writer
    unlink(name)
    unlink(name)
    assert array.sum() == 105


def test_a_name_is_no_path() -> None:
    for wrong in ("other", f"{PREFIX}../x"):
        with pytest.raises(InvalidRequestError, match="no name of a segment"):
            unlink(wrong)


def test_a_killed_process_leaves_nothing_after_a_sweep(name: str) -> None:
    Segment.create(name, 1)
    process = _holder()
    theirs = _line(process)
    assert (FOLDER / theirs).exists()
    assert theirs not in sweep_dead(), "its owner lives"
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and not reaped yet
    assert theirs in sweep_dead(), "a zombie owns nothing"
    process.wait()
    _close(process)
    assert not (FOLDER / theirs).exists()
    assert (FOLDER / name).exists(), "of a living process"


def test_a_supervisor_removes_what_a_process_made() -> None:
    process = _holder()
    theirs = _line(process)
    try:
        assert remove_of(process.pid) == [theirs]
        assert remove_of(process.pid) == []
    finally:
        process.kill()
        process.wait()
        _close(process)


def test_a_later_process_of_the_same_number_is_another_owner() -> None:
    earlier = new_name(attrs.evolve(owner_of(os.getpid()), started=1))
    Segment.create(earlier, 1)
    assert earlier in sweep_dead()


def test_what_belongs_to_another_namespace_is_left() -> None:
    owner = attrs.evolve(owner_of(os.getpid()), started=1, namespace=7)
    foreign = new_name(owner)
    Segment.create(foreign, 1)
    try:
        assert foreign not in sweep_dead()
        assert remove_of(os.getpid()) == []
    finally:
        unlink(foreign)


def test_files_that_are_not_ours_are_left() -> None:
    other = FOLDER / f"{PREFIX}notes"
    other.write_bytes(b"")
    try:
        sweep_dead()
        assert other.exists()
    finally:
        other.unlink()


def test_an_owner_must_live() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with pytest.raises(BackendError, match=f"process {process.pid} is gone"):
        owner_of(process.pid)


def test_an_empty_manifest_has_a_segment_too(name: str) -> None:
    writer = SegmentWriter(name, Manifest([]))
    assert writer.finish() == ()


_HOLDER = """
import sys
from backends.arctic.weights.segment import Segment, new_name
segment = Segment.create(new_name(), 1000)
print(segment.name, flush=True)
sys.stdin.read()
"""


def _holder() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _close(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_found(name: str, dtype: str, value: float) -> None:
    forms: dict[str, Form] = {
        "empty": ((0,), dtype),
        "good": ((4,), dtype),
        "bad": ((4,), dtype),
        "count": ((4,), "int64"),
    }
    manifest = lay_out(forms)
    writer = SegmentWriter(name, manifest)
    largest = torch.finfo(getattr(torch, dtype)).max
    writer.write("good", torch.tensor([largest, -largest, 0, 1], dtype=getattr(torch, dtype)))
    writer.write("bad", torch.tensor([0, value, 1, 2], dtype=getattr(torch, dtype)))
    assert Segment.attach(name).not_finite(manifest) == "bad"
    writer = SegmentWriter(other := new_name(), manifest)
    try:
        assert Segment.attach(other).not_finite(manifest) is None
    finally:
        unlink(other)
